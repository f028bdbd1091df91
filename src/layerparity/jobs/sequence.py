"""Run several commands one after the other, as one: golden, candidate, comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from layerparity import console, registry
from layerparity.config import Config
from layerparity.errors import Exit, UserError


@dataclass
class Settings:
    """conf/job/sequence.yaml: each step is a command's arguments, separated by spaces."""

    name: str = "sequence"
    steps: list[str] = field(default_factory=list)


def run(config: Config) -> Exit:
    """Run the steps in this process; the first one that does not succeed ends the sequence."""
    if not config.job.steps:
        raise UserError("job=sequence has no steps: choose an experiment that lists some.")
    shared = _shared_overrides()
    for number, step in enumerate(config.job.steps, start=1):
        console.say(f"\n[{number} of {len(config.job.steps)}] python run.py {step}")
        composed = _compose([*step.split(), *shared])
        ended: Exit = registry.load("jobs", composed.job.name).run(composed)
        if ended is not Exit.OK:
            return ended
    return Exit.OK


def _shared_overrides() -> list[str]:
    """Return what the user gave beside the experiment, so that each step gets it too."""
    from hydra.core.hydra_config import HydraConfig

    given = HydraConfig.get().overrides.task
    return [each for each in given if not each.startswith(("experiment=", "job="))]


def _compose(overrides: list[str]) -> Any:
    from hydra import compose
    from omegaconf import OmegaConf

    return OmegaConf.to_object(compose("config", overrides=overrides))
