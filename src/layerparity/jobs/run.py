"""Run a scope of a model on a backend and keep its tensors, metrics and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground.errors import Exit
from layerparity.settings.config import Config


@dataclass
class Settings:
    """conf/job/run.yaml."""

    name: str = "run"


def run(config: Config) -> Exit:
    """Make one run. Nothing is logged before the command is known to make sense."""
    from layerparity.run.make import make

    make(config)
    return Exit.OK
