"""Serve the MLflow UI of the tracking store on this machine until Ctrl-C."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.settings.key import key

# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ()


@dataclass
class Settings:
    """conf/job/ui.yaml. ``host`` must be a loopback address."""

    name: str = "ui"
    port: int = key(5000, "port of the MLflow UI", least=0, most=65535)
    host: str = key("127.0.0.1", "address to serve at; loopback only")


def run(config: Any) -> Exit:
    """Serve ``config.tracking`` as ``config.job`` says; of a server, print where its runs are."""
    from layerparity.settings.tracking import SERVER, read_config

    tracking = read_config(config.tracking)
    if tracking.name == SERVER:
        from layerparity.tracking.opening import open_store

        console.say(f"The runs are on the tracking server: {open_store(tracking).runs_url}")
        return Exit.OK
    host, port = config.job.host, config.job.port
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UserError(
            f"The UI has no password and does not serve {host}. From your machine run "
            f"'ssh -L {port}:127.0.0.1:{port} THIS_MACHINE' and open http://127.0.0.1:{port}"
        )
    from layerparity.tracking.process import terminable
    from layerparity.tracking.server import running

    try:
        with terminable(), running(tracking, port, host) as server:
            console.say(f"MLflow UI of {tracking.root}: {server.runs}  (Ctrl-C ends it)")
            server.wait()
    except KeyboardInterrupt:
        console.say("The UI has ended.")
    return Exit.OK
