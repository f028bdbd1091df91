"""Upload the runs that wait for a tracking server since it went away, and say what still waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.program import program
from layerparity.ground.quoting import typed

if TYPE_CHECKING:
    from layerparity.settings.config import Config
    from layerparity.settings.tracking import TrackingConfig


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ()


@dataclass
class Settings:
    """conf/job/sync.yaml."""

    name: str = "sync"


def run(config: Config) -> Exit:
    """Open the server's store, which uploads what waits for it; exit 1 where a run waits still."""
    from layerparity.settings.tracking import SERVER, read_config
    from layerparity.tracking.opening import open_store
    from layerparity.tracking.spool import waiting

    tracking = read_config(config.tracking)
    if tracking.name != SERVER:
        _say_others(tracking)
        raise UserError(
            "job=sync uploads the runs that wait for a tracking server",
            "add tracking=server tracking.uri=http://HOST:PORT.",
        )
    open_store(tracking)
    left = waiting(tracking).get(tracking.address, [])
    for folder in left:
        console.say(f"still waits: {folder}")
    if not left:
        console.say(f"Nothing waits for {tracking.address}.")
    _say_others(tracking)
    return Exit.FAILED if left else Exit.OK


def _say_others(tracking: TrackingConfig) -> None:
    """Print the command for each other server that runs in this folder wait for."""
    from layerparity.tracking.spool import waiting

    folder = typed("tracking.folder", tracking.folder)
    for address, folders in sorted(waiting(tracking).items()):
        if address != tracking.address:
            uri = typed("tracking.uri", address)
            console.say(
                f"{len(folders)} wait for another server: "
                f"{program()} job=sync tracking=server {uri} {folder}"
            )
