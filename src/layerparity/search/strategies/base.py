"""What a strategy is given (a bench that runs and compares), and what it answers.

A strategy's file holds ``STRATEGY: Strategy``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from layerparity.judge.descend import first_guilty
from layerparity.judge.guilt import Guilt
from layerparity.record.comparison import Comparison
from layerparity.report.sentence import Step


class Bench(Protocol):
    """Makes candidate runs of parts of the model and compares each with the golden.

    Blocks are ``first`` to ``last`` of the scope that is bisected, both inclusive.
    """

    @property
    def first(self) -> int:
        """The first block."""

    @property
    def last(self) -> int:
        """The last block."""

    def isolated(self) -> Comparison:
        """Run the whole scope in one run, every block fed the golden's own input to it."""

    def chained(self, first: int, last: int) -> Comparison:
        """Run blocks ``first..last``: the golden's input to the first, then each its output."""

    def ends(self) -> Comparison | None:
        """Run what the scope has outside the blocks, isolated; None where it has nothing there."""


@dataclass(frozen=True)
class Found:
    """The wrong place: a block or a stage outside the blocks; None where nothing is wrong.

    ``guilt`` is what its comparison already says of the place, ``local`` that this was judged by
    local error; an accumulated error has still to be confirmed. ``note`` is for the reader.
    ``doubt`` says what a chained run that is not wrong could not tell.
    """

    place: int | str | None
    steps: tuple[Step, ...] = ()
    guilt: Guilt | None = None
    comparison: Comparison | None = field(default=None, compare=False)
    local: bool = False
    note: str = ""
    doubt: str = ""


class Strategy(Protocol):
    """One way to find the first (or last) wrong place."""

    name: str

    def find(self, bench: Bench) -> Found:
        """Run what is needed on the bench and return the place."""


def read(comparison: Comparison, asked: str, before: Sequence[Step] = ()) -> Found:
    """Return the first place that is locally wrong in a comparison of isolated stages."""
    guilt = first_guilty(comparison)
    told = f"{guilt.called} is wrong" if guilt else "nothing is wrong by itself"
    steps = (*before, Step(asked, told, guilt is not None))
    place = None if guilt is None else guilt.component if guilt.layer is None else guilt.layer
    return Found(place, steps, guilt, comparison, local=True)


def after_blocks(bench: Bench, steps: Sequence[Step], doubt: str = "") -> Found:
    """Return what is wrong of the stages outside the blocks, each judged alone.

    ``doubt`` is what the blocks' chain left open.
    """
    ends = bench.ends()
    if ends is None:
        return Found(None, tuple(steps), doubt=doubt)
    return replace(read(ends, "embedding, norm and head, each alone", steps), doubt=doubt)


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
