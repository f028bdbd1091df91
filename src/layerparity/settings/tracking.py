"""Where runs are kept: the keys of conf/tracking, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError, nearest
from layerparity.ground.files import expanded
from layerparity.ground.quoting import typed
from layerparity.ground.secrets import refuse_login
from layerparity.settings.key import key

EMBEDDED = "embedded"
SERVER = "server"
UI_ADDRESS = "http://127.0.0.1:5000"
UI_FILE = "ui.txt"
# Of an experiment, to MLflow.
_LONGEST_NAME = 500


@dataclass
class TrackingConfig:
    """conf/tracking. ``embedded`` keeps all in ``folder``; ``server`` talks to ``uri``.

    ``folder`` is relative to the current directory; with a server it holds what waits for upload
    (``spool``) and what was downloaded (``cache``). ``timeout_s`` is the limit of one request.
    """

    name: str = EMBEDDED
    uri: str | None = key(None, "address of the tracking server")
    folder: str = key("mlruns", "where runs are kept (server: where they wait and are cached)")
    experiment: str = key("layerparity", "the MLflow experiment that holds the runs")
    timeout_s: int = key(5, "seconds that a server may take for an answer", least=1, most=3600)
    cache_gb: float = key(100.0, "gigabytes that what was fetched or unpacked may take", least=0)

    @property
    def root(self) -> Path:
        """``folder`` as an absolute path without links."""
        return expanded(self.folder).resolve()

    @property
    def address(self) -> str:
        """Where a browser finds the runs: the server, or where ``job=ui`` last served the store."""
        if self.uri:
            return self.uri.rstrip("/")
        noted = self.root / UI_FILE
        return noted.read_text(encoding="utf-8").strip() if noted.is_file() else UI_ADDRESS

    @property
    def place(self) -> str:
        """The store in words for a message: its folder or its address."""
        return self.address if self.name == SERVER else str(self.root)

    @property
    def words(self) -> list[str]:
        """What a command has to say to use this store; nothing for the usual one."""
        usual = TrackingConfig()
        words = [] if self.root == usual.root else [typed("tracking.folder", self.folder)]
        if self.name == SERVER:
            words = ["tracking=server", typed("tracking.uri", self.uri or "")]
        if self.experiment != usual.experiment:
            words.append(typed("tracking.experiment", self.experiment))
        return words


def read_config(raw: object) -> TrackingConfig:
    """Return the checked config of a dataclass or an OmegaConf node with the same keys.

    Raises UserError where name and uri contradict each other, and for a login in the uri.
    """
    values: dict[str, Any] = {
        each.name: getattr(raw, each.name, each.default) for each in fields(TrackingConfig)
    }
    config = TrackingConfig(**values)
    if config.name not in (EMBEDDED, SERVER):
        known = (EMBEDDED, SERVER)
        raise UserError(
            f"tracking={config.name} does not exist.{nearest(config.name, known)} "
            f"Known: {', '.join(known)}."
        )
    if config.name == EMBEDDED and config.uri:
        raise UserError(
            "tracking.uri is for a server", "add tracking=server, or leave the uri out."
        )
    if not 0 < len(config.experiment) <= _LONGEST_NAME or not config.experiment.isprintable():
        name = config.experiment
        raise UserError(
            f"tracking.experiment={name[:40]!r} is no name, or too long ({len(name)} letters)",
            f"give 1 to {_LONGEST_NAME} letters.",
        )
    refuse_login(config.uri or "")
    if config.name == SERVER and not (config.uri or "").startswith(("http://", "https://")):
        raise UserError(
            "tracking=server needs its address", "add tracking.uri=http://127.0.0.1:5000"
        )
    return config
