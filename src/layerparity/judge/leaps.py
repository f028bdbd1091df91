"""Leaps: components that are fed something wrong already and add far more error than that.

After the first wrong place everything is a consequence, so a second fault behind it does not show
as bad output of good input. It shows as a leap: an error that is much larger than what came in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from layerparity.anatomy.block import Block
from layerparity.judge.guilty import blame, name_in_block, seen_in
from layerparity.record.verdict import Outcome, Row

# A right component passes a relative error on about as large as it came; a norm of a residual
# stream with massive channels may make ten times of it.
LEAP = 100.0
_MEASURES = ("error_ratio", "rel_l2")


def amplified(rows: Mapping[str, Row], block: Block) -> dict[str, float]:
    """Return how many times the error of its inputs a component's output has, by component.

    ``rows`` are one block's in one pass, by address in the block. Only leaps of `LEAP` and more are
    named, in relative L2 against the golden as well as in noise floors; and only where an input
    fails: a component that fails on good inputs is named for that.
    """
    leaps: dict[str, float] = {}
    seen = seen_in(rows)
    for node in block.nodes:
        row = rows.get(node.local)
        if row is None or row.outcome is not Outcome.FAIL:
            continue
        fed = [rows[local] for local in block.origin(node.local, seen).inputs if local in rows]
        leap = _leap(row, fed)
        if leap >= LEAP and any(each.outcome is Outcome.FAIL for each in fed):
            leaps.setdefault(name_in_block(blame(block, node.local, seen)), leap)
    return leaps


def _leap(row: Row, fed: Collection[Row]) -> float:
    """Return the smaller of two ratios: the output's error over the largest of its inputs'."""
    ratios = []
    for name in _MEASURES:
        # Wrong inputs without a size of error, such as other experts, may explain any leap.
        if any(name not in each.metrics and each.outcome is Outcome.FAIL for each in fed):
            return 0.0
        largest = max((each.metrics.get(name, 0.0) for each in fed), default=0.0)
        if name not in row.metrics or not largest > 0:
            return 0.0
        ratios.append(row.metrics[name] / largest)
    return min(ratios)
