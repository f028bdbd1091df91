"""Take runs that job=export wrote into the tracking store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import expanded
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.record.folder import RunFolder
    from layerparity.record.manifest import Manifest


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("run",)


@dataclass
class Settings:
    """conf/job/import.yaml."""

    name: str = "import"


def run(config: Config) -> Exit:
    """Check the export ``run=``, a folder or a file, and keep its runs; say which they are."""
    from layerparity.ground.files import is_there
    from layerparity.record.exported import is_export
    from layerparity.tracking.imports import import_runs
    from layerparity.tracking.links import say_served
    from layerparity.tracking.opening import open_store

    if config.run is None:
        raise UserError(
            "job=import wants to know what", "add run=, a folder or file that job=export wrote."
        )
    path = expanded(config.run).absolute()
    if not is_there(path):
        raise UserError(f"There is no {path}", "give the folder or file that job=export wrote.")
    if not is_export(path):
        raise UserError(
            f"{path} is no export (it has no export.json, or is no zip archive)",
            "write one with job=export; a bare folder of a run is compared as it is: golden=PATH.",
        )
    store = open_store(config.tracking)
    for each in import_runs(store, path, _points):
        kind, name, short = each.run.kind, each.run.name, each.run.id[:8]
        console.say(
            f"imported {kind} {name} ({short})\n{each.run.url}"
            if each.fresh
            else f"{kind} {name} is here already ({short})"
        )
    say_served(config.tracking)
    return Exit.OK


def _points(manifest: Manifest, files: RunFolder) -> Iterator[tuple[str, float, int]]:
    """Yield the metrics that the run has where it was made, but for its seconds."""
    from layerparity.making.write import profile_metrics, site_metrics

    yield from site_metrics(manifest)
    profile = files.read_profile()
    if profile is not None and profile.stages:
        yield from profile_metrics(profile)
