"""Bisect: find the first wrong block, the component in it and its likeliest cause; or the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerparity.ground.errors import Exit
from layerparity.record.stored_run import Kept
from layerparity.settings.config import Config
from layerparity.settings.key import key


@dataclass
class Settings:
    """conf/job/bisect.yaml.

    ``strategy`` is auto, scan, binary or inject. ``good`` and ``bad`` are the keys of a
    configuration that agrees with the golden and of one that does not: a map
    ``{dtype:float32,threads:1}``, or ``dtype=float32`` words as a list or in one text.
    """

    name: str = "bisect"
    strategy: str = key("auto", "how to look for the block: auto, scan, binary or inject")
    good: Any = key(None, "keys of a configuration that is right: {dtype:float32}")
    bad: Any = key(None, "keys of a configuration that is wrong: {dtype:bfloat16,threads:1}")


def run(config: Config) -> Exit:
    """Bisect the model, or the configuration where ``job.good`` or ``job.bad`` is given."""
    return bisect(config).exit


def bisect(config: Config) -> Kept:
    """Bisect, keep what was found and show it."""
    from layerparity.search import blocks, configurations

    if config.job.good or config.job.bad:
        return configurations.bisect(config)
    return blocks.bisect(config)
