"""How a self-test's cell ended, and the bound on a rate that all of them come to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from layerparity.anatomy.block import Block
from layerparity.record.guilt import Guilt
from layerparity.record.verdict import Row
from layerparity.selftest.cells import GridCell

# From how many noise floors on a fault has to be found.
VISIBLE = 2.0
# What no rounding does, in metrics of a site.
_BEYOND = ("flips_outside_noise", "nonfinite_disagreement", "unequal")


class Ending(StrEnum):
    """How one cell ended."""

    NAMED = "named"
    LATE = "named late"
    ELSEWHERE = "named elsewhere"
    MISSED = "missed"
    SILENT = "silent"
    FALSE_ALARM = "false alarm"
    SAME = "bit-equal"
    NOT_HERE = "does not apply"


@dataclass(frozen=True)
class CellResult:
    """How a cell ended: the place that was named, the likeliest cause, and the isolated effect.

    ``effect`` is the largest error ratio among the judged sites of the cell's stage; ``by_sites``
    says whether the tensors alone, without the weights' prints, show that something is wrong.
    """

    cell: GridCell
    ending: Ending
    named: str = ""
    cause: str = ""
    effect: float = 0.0
    note: str = ""
    phase: str = ""
    by_sites: bool = False

    @property
    def below_noise(self) -> bool:
        """Whether nothing was named, and the fault does less than rounding may."""
        return self.ending is Ending.MISSED and 0 < self.effect < VISIBLE


def effect_of(row: Row) -> float:
    """Return a site's error over its floor; what no rounding does is at least twice that."""
    beyond = any(row.metrics.get(each) for each in _BEYOND)
    return max(row.metrics.get("error_ratio", 0.0), VISIBLE if beyond else 0.0)


def ending_of(cell: GridCell, guilt: Guilt | None, changed: bool, block: Block) -> Ending:
    """Return how a cell ended, given what was named and whether any site differs bitwise.

    ``block`` is the structure of the cell's block.
    """
    if cell.clean:
        if guilt is not None:
            return Ending.FALSE_ALARM
        return Ending.SILENT if changed else Ending.SAME
    if guilt is None:
        return Ending.MISSED if changed else Ending.SAME
    if guilt.place.stage != cell.place.stage:
        named, right = (each.site("out").pass_order() for each in (guilt.place, cell.place))
        return Ending.LATE if named > right else Ending.ELSEWHERE
    if _same(guilt, cell.component):
        return Ending.NAMED
    ranks = [block.rank_of_module(each) for each in (guilt.component, cell.component)]
    return Ending.LATE if ranks[0] >= ranks[1] else Ending.ELSEWHERE


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """Return the exact upper confidence bound on a rate (Clopper and Pearson 1934)."""
    if trials == 0:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        tail = sum(
            math.comb(trials, k) * middle**k * (1 - middle) ** (trials - k)
            for k in range(events + 1)
        )
        low, high = (middle, high) if tail > 1 - confidence else (low, middle)
    return high


def _same(guilt: Guilt, component: str) -> bool:
    """Say whether the named component is the expected one; q and k stand for each other.

    So it is where all that lies between two observed values is named, it among them.
    """
    if guilt.component == component or (guilt.between is not None and component in guilt.suspects):
        return True
    siblings = {component, *guilt.also}
    twins = {each.replace(".k_", ".q_").replace(".v_", ".q_") for each in siblings}
    return guilt.component.replace(".k_", ".q_").replace(".v_", ".q_") in twins
