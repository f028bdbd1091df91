"""Strategies that search the blocks for the wrong one: scan, binary, inject.

A strategy is a function of a `Bench`, which makes candidate runs and compares them; it stands by
its name in `STRATEGIES`, which job.strategy=NAME picks from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from layerparity.anatomy.site import Place
from layerparity.ground.errors import UserError
from layerparity.judge.growth import judge_chained
from layerparity.record.verdict import Verdict
from layerparity.report.search import Step, chain_doubt, chain_text
from layerparity.search.bench import Bench

AUTO = "auto"
# Strategies that feed every block from the golden.
_FED = ("scan", "inject")


@dataclass(frozen=True)
class SearchResult:
    """The wrong place: a block or a stage outside the blocks; None where nothing is wrong.

    ``verdict`` already says what is guilty there; an accumulated error, which has none, has still
    to be confirmed. ``note`` is for the reader. ``doubt`` says what a chained run that is not wrong
    could not tell.
    """

    place: Place | None
    steps: tuple[Step, ...] = ()
    verdict: Verdict | None = field(default=None, compare=False)
    note: str = ""
    doubt: str = ""


def scan(bench: Bench) -> SearchResult:
    """Run all blocks at once, each fed from the golden; return the first that is locally wrong.

    One run and one comparison. The place is the first, in forward order, whose input is good and
    whose sites fail.
    """
    return _first_wrong(bench.isolated(), "every block alone, fed from the golden")


def binary(bench: Bench) -> SearchResult:
    """Run chained prefixes, halved; return the first block where error outgrows rounding.

    O(log n) runs, for a candidate that can only run from the start of the model. Every block of a
    prefix is judged: an error may vanish again further down. Then come the stages after the blocks.
    """
    chains = _Chains(bench)
    block = smallest(
        bench.first,
        bench.last,
        lambda last: chains.wrong(bench.first, last, f"blocks {bench.first}..{last}, chained"),
    )
    if block is not None:
        return SearchResult(Place(block), tuple(chains.steps))
    return _after_blocks(bench, chains)


def inject(bench: Bench) -> SearchResult:
    """Put the golden's activations in at block k until the end is right; return the last wrong one.

    O(log n) runs of suffixes. Every block from an injection on is judged: one at or before the
    place shows it.
    """
    chains = _Chains(bench)

    def right(first: int) -> bool:
        asked = f"golden put in at block {first}, chained to {bench.last}"
        return not chains.wrong(first, bench.last, asked)

    if right(bench.first):
        return _after_blocks(bench, chains)
    healed = smallest(bench.first + 1, bench.last, right) if bench.last > bench.first else None
    last_wrong = bench.last if healed is None else healed - 1
    note = f"this is the last wrong block of {bench.first}..{bench.last}; others may come before"
    return SearchResult(Place(last_wrong), tuple(chains.steps), note=note)


Strategy = Callable[[Bench], SearchResult]
STRATEGIES: dict[str, Strategy] = {"binary": binary, "inject": inject, "scan": scan}


def choose(name: str, bench: Bench) -> str:
    """Return a strategy's name; for auto, scan where the golden has every block's input.

    Raises UserError for an unknown one, and for one that needs inputs that the golden lacks.
    """
    if name == AUTO:
        name = "scan" if bench.holds_inputs else "binary"
    elif name not in STRATEGIES:
        raise UserError(f"job.strategy={name} is unknown. Known: {AUTO}, {', '.join(STRATEGIES)}.")
    if name in _FED and not bench.holds_inputs:
        raise UserError(
            f"job.strategy={name} feeds every block from the golden, which lacks some inputs: make "
            "one with capture=default, or use job.strategy=binary."
        )
    return name


@dataclass
class _Chains:
    """Chained runs of a bench: what each was asked and told, and the doubt that the last left."""

    bench: Bench
    steps: list[Step] = field(default_factory=list)
    doubt: str = ""

    def wrong(self, first: int, last: int, asked: str) -> bool:
        """Run blocks ``first..last`` and say whether one of them is wrong."""
        judged = judge_chained(self.bench.chained(first, last), last, first)
        self.steps.append(Step(asked, chain_text(judged), judged.wrong))
        self.doubt = chain_doubt(judged)
        return judged.wrong


def _first_wrong(verdict: Verdict, asked: str, before: Sequence[Step] = ()) -> SearchResult:
    """Return the first place that is locally wrong by a verdict on isolated stages."""
    guilt = verdict.guilty
    answer = f"{guilt} is wrong" if guilt else "nothing is wrong by itself"
    steps = (*before, Step(asked, answer, guilt is not None))
    place = Place.parse(guilt.place.stage) if guilt else None
    return SearchResult(place, steps, verdict)


def _after_blocks(bench: Bench, chains: _Chains) -> SearchResult:
    """Return what is wrong of the stages outside the blocks, each judged alone."""
    ends = bench.ends()
    if ends is None:
        return SearchResult(None, tuple(chains.steps), doubt=chains.doubt)
    result = _first_wrong(ends, "embedding, norm and head, each alone", chains.steps)
    return replace(result, doubt=chains.doubt)


def smallest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest k of ``low..high`` for which it holds, or None; O(log n) questions.

    Assumes that it goes on to hold from there: asks for ``high`` first, then halves.
    """
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high
