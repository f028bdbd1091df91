"""Run a scope of a model on a backend and keep its tensors, metrics and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig

from layerparity.ground.errors import Exit
from layerparity.settings.config import Config


@dataclass
class Settings:
    """conf/job/run.yaml."""

    name: str = "run"


def run(config: Config) -> Exit:
    """Make one run. Nothing is logged before the command is known to make sense.

    Of a part of a sweep one line is shown, or all with ``hydra.verbose=true``.
    """
    from layerparity.run import sweep, sweep_part
    from layerparity.run.make import make

    if sweep.part() and not HydraConfig.get().verbose:
        sweep_part.make_part(config)
    else:
        make(config)
    return Exit.OK
