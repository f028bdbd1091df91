"""Weight sketches: how two prints of one tensor stand to each other, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerparity.manifest import WeightPrint

# Sums are made in float64 from the same float32 values: only their order differs.
_SAME = 1e-9
# An angle from 64 buckets is known to about 1/8: unrelated tensors stay below four times that.
_RELATED = 0.5


def cosine(left: WeightPrint, right: WeightPrint) -> float:
    """Estimate the cosine between two tensors less their means; 0 where one is constant."""
    width = min(len(left.sketch), len(right.sketch))
    if len(left.sketch) != len(right.sketch) or not width:
        return 0.0
    product = sum(a * b for a, b in zip(left.sketch, right.sketch, strict=True))
    norms = math.hypot(*left.sketch) * math.hypot(*right.sketch)
    return product / norms if norms > 0 else 0.0


def related(left: WeightPrint, right: WeightPrint) -> bool:
    """Return whether one tensor is the other, changed; a flipped sign is a change."""
    return abs(cosine(left, right)) >= _RELATED


def relative_change(expected: WeightPrint, actual: WeightPrint) -> float:
    """Estimate ||actual - expected|| / ||expected||, from the sketches and the means."""
    if len(expected.sketch) != len(actual.sketch) or not expected.stats["l2"]:
        return math.inf
    apart = (a - b for a, b in zip(actual.sketch, expected.sketch, strict=True))
    shifted = (actual.stats["mean"] - expected.stats["mean"]) ** 2 * elements([expected])
    return math.sqrt(sum(each * each for each in apart) + shifted) / expected.stats["l2"]


def averaged(expected: WeightPrint, actual: WeightPrint) -> bool:
    """Return whether a tensor kept its mean and lost part of its spread, as averages do."""
    mean, spread = expected.stats["mean"], expected.stats["std"]
    # Weights around zero keep their mean whatever is done to them.
    if abs(mean) < 0.1 * spread:
        return False
    # A mean is rounded where it is stored: half a step of bfloat16, at most.
    kept = abs(actual.stats["mean"] - mean) <= abs(mean) / 256
    return kept and actual.stats["std"] < 0.95 * spread


def same_values(expected: Sequence[WeightPrint], actual: Sequence[WeightPrint]) -> bool:
    """Return whether some tensors hold together the values that they should, in any order."""
    if elements(expected) != elements(actual) or not expected:
        return False
    ends = [
        (min(p.stats["min"] for p in s), max(p.stats["max"] for p in s)) for s in (expected, actual)
    ]
    squares = [math.fsum(p.stats["l2"] ** 2 for p in side) for side in (expected, actual)]
    sums = [math.fsum(p.stats["mean"] * elements([p]) for p in side) for side in (expected, actual)]
    room = _SAME * math.sqrt(elements(expected) * squares[0])
    return (
        ends[0] == ends[1]
        and math.isclose(*squares, rel_tol=_SAME)
        and math.isclose(*sums, rel_tol=_SAME, abs_tol=room)
    )


def elements(prints: Sequence[WeightPrint]) -> int:
    """Return how many values some tensors have together."""
    return sum(math.prod(each.shape) for each in prints)
