"""Run a scope of a model on a backend and keep its tensors, metrics and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig

from layerparity.ground import console
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
    if config.dry_run:
        from layerparity.making import dry

        dry.show(config)
        return Exit.OK
    from layerparity.making import next_step, part_devices, sweep, sweep_part
    from layerparity.making.make import make_run

    if sweep.part():
        # Before a device is taken that the other one may want.
        sweep_part.await_part_before(config)
        part_devices.take(config)
    if sweep.part() and not HydraConfig.get().verbose:
        return Exit.INCONCLUSIVE if sweep_part.make_part(config).off else Exit.OK
    run = make_run(config)
    if run.off:
        return Exit.INCONCLUSIVE
    # A sweep, and an experiment of several steps, go on by themselves.
    if not sweep.part() and HydraConfig.get().runtime.choices["job"] == "run":
        console.say(f"next:   {next_step.after_run(config, run)}")
    return Exit.OK
