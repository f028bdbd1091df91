"""What a sweep says of each of its parts: one line. The part's own story is in its log file."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig

from layerparity.ground import console
from layerparity.making.make import FinishedRun, make_run
from layerparity.making.sweep import PARTS_VARIABLE

if TYPE_CHECKING:
    from layerparity.record.manifest import Manifest
    from layerparity.settings.config import Config

# Notes that a part in this process said: the next one says only what is new.
_noted: set[str] = set()


def make_part(config: Config) -> FinishedRun:
    """Make one part of a sweep and say so in a line. Raises UserError where it cannot be made."""
    began = time.monotonic()
    number = HydraConfig.get().job.num + 1
    parts, started = os.environ.get(PARTS_VARIABLE, f"{number} {time.time()}").split()
    title = f"{number} of {parts}"
    with console.brief(title, _noted):
        one = make_run(config)
    how = "reused" if one.is_reused else f"{time.monotonic() - began:.1f} s"
    left = (time.time() - float(started)) / number * (int(parts) - number)
    more = [f"about {console.duration_text(left)} left"] if number < int(parts) else []
    words = [f"{title}: {one.name} {one.id[:8]}", described(one.manifest), how, *more]
    console.say(", ".join(words))
    return one


def described(manifest: Manifest) -> str:
    """Return what a run holds: its sites, the size of its last output, and what is no number."""
    bad = sum(int(record.stats["nan"] + record.stats["inf"]) for record in manifest.records)
    last = manifest.stages[-1]
    ends = [each for each in manifest.records if each.site.path == last and each.site.end == "out"]
    rms = [f"output rms {each.stats['rms']:.4g}" for each in ends[:1]]
    return ", ".join([f"{len(manifest.records)} sites", *rms, f"{bad or 'no'} NaN or Inf"])
