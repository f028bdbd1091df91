"""What most likely follows a run or a sweep, as a command to paste."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from layerparity.ground.program import program
from layerparity.making import steps, sweep
from layerparity.making.inputs.golden import GOLDEN_HERE
from layerparity.ports.opening import open_backend
from layerparity.record.stored_run import FINISHED
from layerparity.settings.config import Config, RunKind

if TYPE_CHECKING:
    from layerparity.making.make import FinishedRun
    from layerparity.making.sweep import ClosedSweep

_SHOWN = 8
# What is the golden's own: where and how it was computed, what it was fed, what it was called.
_OF_THE_GOLDEN = (
    "backend",
    "device_map",
    "experts_implementation",
    "golden",
    "inputs",
    "kind",
    "max_memory",
    "moe_ep_degree",
    "name",
    "offload_folder",
    "prompt",
    "reference",
    "resume",
    "reuse",
    "seq_len",
    "threads",
    "tp_degree",
)
_CANDIDATE = {"backend": "neuron", "inputs": "golden"}
# What a golden has to share with a candidate that no golden fed, to be compared with it.
_OF_BOTH = (
    "capture",
    "component",
    "dtype",
    "end",
    "generate",
    "inputs",
    "layer",
    "model",
    "prompt",
    "scope",
    "seq_len",
    "start",
    "tracking",
)


def after_run(config: Config, run: FinishedRun) -> str:
    """Return the candidate's command after a golden run, a comparison after a candidate's.

    One that no golden could feed is fed by the prompt, as its golden will be, which comes next. Of
    other values of its own a golden is made when it is compared; of chosen tokens it cannot be.
    """
    if run.manifest.kind == RunKind.golden.value:
        own = {k: v for k, v in steps.own_settings(config).items() if not _of_the_golden(k)}
        return _elsewhere(steps.command({**_CANDIDATE, "golden": run.id[:_SHOWN], **own}))
    sides: steps.Settings = {"golden": run.fed_by[0][:_SHOWN]} if len(run.fed_by) == 1 else {}
    sides["candidate"] = run.id[:_SHOWN]
    prompted = config.inputs.name == "auto" and not config.prompt.given
    if not run.fed_by and (prompted or run.manifest.kept):
        own = {k: v for k, v in steps.own_settings(config).items() if _head(k) in _OF_BOTH}
        return steps.command({**GOLDEN_HERE, **own})
    own_values = {} if run.fed_by else {"job.own_inputs": True}
    return steps.command(
        {"job": "compare", **sides, **own_values, **steps.judging_settings(config)}
    )


def after_sweep(closed: ClosedSweep, mistaken: Collection[str] = ()) -> str:
    """Return what follows a sweep: of candidates after golden runs, a comparison after candidates.

    The same sweep again where a part did not finish, or was not begun; nothing where none of them
    finished: the same again would end alike. So would a part that is ``mistaken`` (its words) and
    got no run: it is left out where the others are a sweep without it, and named.
    """
    children, words, parent = closed.children, closed.words, closed.parent[:_SHOWN]
    short = len(closed.rows) < closed.total
    if not short and all(child.status != FINISHED for child in children):
        return ""
    kinds = {child.kind for child in children}
    if short or any(row.status != FINISHED for row in closed.rows) or len(kinds) != 1:
        refused = [part for part in closed.runless if part in mistaken]
        kept = _without(words, refused)
        again = _sweep([*kept, *(["reuse=true"] if "reuse=true" not in kept else [])])
        if not refused:
            return again
        how = "still in it, and refused again" if kept == words else "not in it"
        changed = [" ".join(w for w in part.split(" ") if w not in words) for part in refused]
        return f"{again}\n        ({how} until you mend what was refused: {', '.join(changed)})"
    if kinds == {RunKind.golden.value}:
        own = [word for word in words if not _of_the_golden(word.partition("=")[0])]
        more = [f"{key}={value}" for key, value in _CANDIDATE.items()]
        return _elsewhere(_sweep([*more, f"golden={parent}", *own]))
    kept = [word for word in words if word.startswith(("tracking", "tolerance"))]
    return f"{program()} {shlex.join(['job=compare', f'candidate={parent}', *kept])}"


def _elsewhere(command: str) -> str:
    """Return a candidate's command, with a remark where its backend cannot run here."""
    fit = open_backend.affinity(_CANDIDATE["backend"])
    if fit.score:
        return command
    return f"{command}\n        (not here: {fit.found}; type it where that runs, with these runs)"


def _without(words: list[str], refused: Sequence[str]) -> list[str]:
    """Return a sweep's words without some parts; the same where no one sweep is all the others."""
    parts = sweep.parts_of(words)
    kept = [part for part in parts if " ".join(part) not in refused]
    left = [list(dict.fromkeys(column)) for column in zip(*kept, strict=True)]
    if not kept or math.prod(map(len, left)) != len(kept):
        return words
    before = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    return [
        word if now == then else f"{word.partition('=')[0]}={_values(now)}"
        for word, now, then in zip(words, left, before, strict=True)
    ]


def _values(words: Sequence[str]) -> str:
    return ",".join(word.partition("=")[2] for word in words)


def _sweep(words: Sequence[str]) -> str:
    return f"{program()} {shlex.join(['-m', *words])}"


def _of_the_golden(key: str) -> bool:
    return _head(key) in _OF_THE_GOLDEN or key.lstrip("+") == "model.original"


def _head(key: str) -> str:
    return key.lstrip("+").partition(".")[0]
