"""What a sweep says of each of its parts: one line. The part's own story is in its log file."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.making import endings
from layerparity.making.make import FinishedRun, make_run
from layerparity.making.prepare import with_kind
from layerparity.making.sweep import PARENT_VARIABLE, PARTS_VARIABLE, open_store, part
from layerparity.settings.config import FeedMode, RunKind

if TYPE_CHECKING:
    from layerparity.record.manifest import Manifest
    from layerparity.settings.config import Config

_SHOWN = 8
# Seconds between two looks at whether another part has ended.
_EVERY = 0.5
# And two looks at whether its process is alive, as which its run is one of these.
_ALIVE = 20.0
_ALIVE_AS = ("RUNNING", "SCHEDULED", "FINISHED")
# Notes that a part in this process said: the next one says only what is new.
_noted: set[str] = set()
# When the parts that ended in this process did, and the goldens that were named, of one sweep.
_ended: list[float] = []
_goldens: set[str] = set()


def await_part_before(config: Config) -> None:
    """Wait for the part of a golden that this one goes on from, where other processes run them.

    Raises UserError where that one did not succeed.
    """
    golden = with_kind(config).kind is RunKind.golden and config.feed is not FeedMode.isolated
    if not (config.chunk and golden) or endings.folder_of_others() is None:
        return
    own, before = f"chunk={config.chunk}", f"chunk={config.chunk - 1}"
    own_words = part().split(" ")
    words = " ".join(
        each.replace(own, before) if each.lstrip("+") == own else each for each in own_words
    )
    if (ending := endings.ending_of(words)) is None:
        console.say(f"{own} waits for {before}, which it goes on from")
    looked = time.monotonic()
    while ending is None:
        time.sleep(_EVERY)
        ending = endings.ending_of(words)
        if time.monotonic() - looked > _ALIVE and ending is None:
            # Who was killed leaves no word; a store closes the run of one that beats no more.
            if _has_died(config, words):
                break
            looked = time.monotonic()
    if ending is None or ending.exit is not Exit.OK:
        raise UserError(f"{own} goes on from {before}, which did not succeed", "mend that one.")


def _has_died(config: Config, words: str) -> bool:
    """Say whether a part of this sweep has a run that ended and is not finished."""
    store = open_store(config.tracking)
    children = store.children(os.environ.get(PARENT_VARIABLE, ""))
    own = [child.status for child in children if child.tags.get("part") == words]
    return any(status not in _ALIVE_AS for status in own)


def make_part(config: Config) -> FinishedRun:
    """Make one part of a sweep and say so in a line. Raises UserError where it cannot be made."""
    began = time.monotonic()
    number = HydraConfig.get().job.num + 1
    parts, started = os.environ.get(PARTS_VARIABLE, f"{number} {time.time()}").split()
    title = f"{number} of {parts}"
    if number == 1:
        _ended.clear()
        _goldens.clear()
    with console.brief(title, _noted):
        one = make_run(config)
    how = "reused" if one.is_reused else f"{time.monotonic() - began:.1f} s"
    fed = ", ".join(each[:_SHOWN] for each in one.fed_by)
    more = [f"fed by golden {fed}"] if fed and fed not in _goldens else []
    _goldens.add(fed)
    each = _seconds_of_one(number, float(started))
    if number < int(parts) and each is not None:
        more.append(f"about {console.duration_text(each * (int(parts) - number))} left")
    words = [f"{title}: {one.name} {one.id[:_SHOWN]}", described(one.manifest), how, *more]
    console.say(", ".join(words))
    return one


def _seconds_of_one(number: int, started: float) -> float | None:
    """Return how long a part takes; None of the first, which imports and compiles for all.

    Of parts in several processes at once it is the sweep's time over their number.
    """
    _ended.append(time.time())
    if number == 1:
        return None
    alone = len(_ended) == number
    return (_ended[-1] - _ended[0]) / (number - 1) if alone else (_ended[-1] - started) / number


def described(manifest: Manifest) -> str:
    """Return what a run holds: its sites, the size of its last output, and what is no number."""
    bad = sum(int(record.stats["nan"] + record.stats["inf"]) for record in manifest.records)
    last = manifest.stages[-1]
    ends = [each for each in manifest.records if each.site.path == last and each.site.end == "out"]
    rms = [f"output rms {each.stats['rms']:.4g}" for each in ends[:1]]
    return ", ".join([f"{len(manifest.records)} sites", *rms, f"{bad or 'no'} NaN or Inf"])
