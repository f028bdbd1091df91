"""Replays: a golden's block computed again with known mistakes planted in it, one at a time.

Who makes the runs offers them, who judges asks for them, and neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerparity.anatomy.site import Place
from layerparity.record.guilt import SHOWN, Cause

if TYPE_CHECKING:
    import torch

    from layerparity.mistakes.fault import Fault
    from layerparity.record.stored_run import StoredRun


# Of several mistakes that give the same numbers, how many are said.
_NAMED = 3


@dataclass(frozen=True)
class Trial:
    """What a block of the golden gives in the prefill with one mistake in it; sound without one.

    ``tensors`` are [batch, token, ...] on the CPU in canonical layout, by address in the block.
    What was ``drawn`` at random is nobody else's: it refutes nothing.
    """

    fault: Fault | None
    tensors: Mapping[str, torch.Tensor]
    drawn: bool = False


class Replays(Protocol):
    """Computes a golden's block again, sound at first, then with each mistake that is asked for."""

    def __call__(
        self,
        golden: StoredRun,
        block: Place,
        dtype: str,
        asked: Callable[[Fault], bool],
        fed: Mapping[str, torch.Tensor],
    ) -> Iterator[Trial]:
        """Yield the trials of a block in a floating type; none where the block cannot be had.

        What was ``fed`` to the golden inside it goes on there in place of what is computed:
        floating [batch, token, ...] by address in the block; nothing for a golden of its own.
        """


@dataclass(frozen=True)
class Replayed:
    """What replays came to: mistakes that give the candidate's numbers, and causes that do not.

    Of mistakes of sharding that give the same numbers, those of as many ranks as the candidate has
    are the ones that it can make.
    """

    shown: tuple[Fault, ...] = ()
    refuted: frozenset[str] = frozenset()

    def ranks(self, degree: int) -> tuple[int, ...]:
        """Return who of so many ranks makes each mistake shown: one, or all; none where open.

        Of one rank, every other rank's was planted as well, and does not give these numbers.
        """
        shared = all(fault.degree == degree > 1 for fault in self.shown)
        found = {fault.rank for fault in self.shown} if shared else set()
        if found == {None}:
            return tuple(range(degree))
        return tuple(rank for rank in found if rank is not None and len(found) == 1)

    @property
    def causes(self) -> list[Cause]:
        """The one cause that was shown; several mistakes that give the same numbers are one."""
        if not self.shown:
            return []
        each = list(dict.fromkeys(fault.sentence for fault in self.shown))
        text, more = each[0], len(each) - _NAMED
        if len(each) > 1:
            others = f", or {more} more like these" if more > 0 else ""
            all_of_them = "both" if len(each) == 2 else "all of them"
            text = f"either {', or '.join(each[:_NAMED])}{others}: {all_of_them} give these numbers"
        reasons = ["planted in the golden's own block, it gives the candidate's numbers"]
        doubts = dict.fromkeys(each.refuted_by for each in self.shown if each.refuted_by)
        reasons += [f"refuted by a token that has {each}: none has" for each in doubts]
        ids = tuple(dict.fromkeys(fault.cause for fault in self.shown))
        return [Cause(ids[0], text, reasons, grade=SHOWN, alike=ids[1:])]
