"""What most likely follows a run or a sweep, as a command to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerparity.ground.program import program
from layerparity.record.stored_run import FINISHED
from layerparity.run import steps
from layerparity.settings.config import Config, RunKind

if TYPE_CHECKING:
    from layerparity.run.make import Made
    from layerparity.run.sweep import ClosedSweep

_SHOWN = 8
# What is the golden's own: where and how it was computed, what it was fed, what it was called.
_OF_THE_GOLDEN = (
    "backend",
    "device_map",
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


def after_run(config: Config, run: Made) -> str:
    """Return the candidate's command after a golden run, a comparison after a candidate's."""
    if run.manifest.kind == RunKind.golden.value:
        own = {k: v for k, v in steps.own_settings(config).items() if not _of_the_golden(k)}
        return steps.command({**_CANDIDATE, "golden": run.id[:_SHOWN], **own})
    sides = {"golden": run.fed_by[0][:_SHOWN]} if len(run.fed_by) == 1 else {}
    sides["candidate"] = run.id[:_SHOWN]
    return steps.command({"job": "compare", **sides, **steps.judging_settings(config)})


def after_sweep(closed: ClosedSweep) -> str:
    """Return what follows a sweep: of candidates after golden runs, a comparison after candidates.

    The same sweep again where a part did not finish, or was not begun; nothing where none of them
    finished: the same again would end alike.
    """
    children, words, parent = closed.children, closed.words, closed.parent[:_SHOWN]
    short = len(closed.rows) < closed.total
    if not short and all(child.status != FINISHED for child in children):
        return ""
    kinds = {child.kind for child in children}
    if short or any(row.status != FINISHED for row in closed.rows) or len(kinds) != 1:
        return _sweep([*words, *(["reuse=true"] if "reuse=true" not in words else [])])
    if kinds == {RunKind.golden.value}:
        own = [word for word in words if not _of_the_golden(word.partition("=")[0])]
        more = [f"{key}={value}" for key, value in _CANDIDATE.items()]
        return _sweep([*more, f"golden={parent}", *own])
    kept = [word for word in words if word.startswith(("tracking", "tolerance"))]
    return f"{program()} {shlex.join(['job=compare', f'candidate={parent}', *kept])}"


def _sweep(words: Sequence[str]) -> str:
    return f"{program()} {shlex.join(['-m', *words])}"


def _of_the_golden(key: str) -> bool:
    return key.lstrip("+").partition(".")[0] in _OF_THE_GOLDEN
