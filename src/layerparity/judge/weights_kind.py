"""Weight kinds: in what way a tensor's values are not those it should hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from layerparity.numbers.pieces import IN_BLOCKS
from layerparity.record.manifest import WeightPrint
from layerparity.record.weights import Fate

_SEEN = 1e-4
# The largest stored number of each format, zero points not subtracted, and what scales it.
LARGEST = {
    "float8_e4m3fn": (448.0, "weight_scale_inv"),
    "MXFP4": (6.0, "scale"),
    "NVFP4": (6.0, "scale"),
    "INT4": (15.0, "scale"),
    "INT8": (255.0, "scale"),
    "Q4_0": (8.0, "scale"),
    "Q5_0": (16.0, "scale"),
    "Q8_0": (128.0, "scale"),
}
# The formats whose numbers can be unpacked wrongly.
PACKED = {*LARGEST, *IN_BLOCKS}
# Scales are far below 1: weights without them are larger by more than this.
_UNSCALED = 8.0


@dataclass(frozen=True)
class WeightFate:
    """What became of one tensor; its fields are those of the `WeightFinding` that it ends in."""

    what: str
    fate: Fate
    numbers: dict[str, float] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    lacks: str = ""


def altered(expected: WeightPrint, actual: WeightPrint) -> WeightFate:
    """Return what became of a tensor whose values are not those it should hold."""
    if is_constant(actual) and not is_constant(expected):
        return WeightFate("constant", Fate.FROZEN, _one_number(expected, actual))
    if same_values([expected], [actual]) and is_visible(expected, actual):
        return WeightFate("reordered", Fate.OTHER_ORDER)
    return _change(expected, actual)


def sliced(actual: WeightPrint) -> WeightFate:
    """Return the fate of a tensor of which a rank holds its slice alone, and nothing else."""
    (first, end), length = actual.kept, actual.shape[0]
    numbers = {"first": float(first), "last": float(end - 1), "length": float(length)}
    return WeightFate("changed_value", Fate.SLICED, numbers)


def is_constant(print_: WeightPrint) -> bool:
    """Return whether all values of a tensor are one."""
    ends = print_.stats
    return "min" in ends and ends["min"] == ends["max"]


def is_finite(print_: WeightPrint) -> bool:
    """Return whether a tensor holds neither NaN nor Inf."""
    return math.isfinite(print_.stats["l2"])


def _change(expected: WeightPrint, actual: WeightPrint) -> WeightFate:
    """Return what became of a tensor that is neither a constant nor the right values reordered."""
    if not is_finite(actual):
        return WeightFate("changed_value", Fate.NOT_FINITE)
    right, own = (max(-each.stats["min"], each.stats["max"]) for each in (expected, actual))
    if actual.stored in LARGEST and own > _UNSCALED * right:
        # Scaled to the type's whole range, the largest number as stored is its largest.
        largest, lacks = LARGEST[actual.stored]
        dropped = largest / 2 < own <= largest
        fate = Fate.SCALE_DROPPED if dropped else Fate.SCALE_UNUSED
        sizes = {"largest": own, "expected": right}
        return WeightFate("changed_value", fate, sizes, lacks=lacks)
    if averaged(expected, actual) and not cosine(expected, actual) > 0.99:
        return WeightFate("changed_value", Fate.AVERAGED, _spreads(expected, actual))
    if not related(expected, actual) and not summed(expected, actual):
        size = actual.stats["std"] / expected.stats["std"] if expected.stats["std"] else 0.0
        if actual.stored in PACKED and 0.5 < size < 2:
            return WeightFate("changed_value", Fate.UNPACKED, _spreads(expected, actual))
        return never_loaded(expected, actual)
    change = relative_change(expected, actual)
    factor = actual.stats["l2"] / expected.stats["l2"] if expected.stats["l2"] else 0.0
    return WeightFate("changed_value", Fate.CHANGED, {"change": change, "factor": factor})


def is_visible(expected: WeightPrint, actual: WeightPrint) -> bool:
    """Return whether two tensors differ by more than the five digits of a sketch."""
    return relative_change(expected, actual) > _SEEN


def never_loaded(expected: WeightPrint, actual: WeightPrint) -> WeightFate:
    """Return the fate of a tensor that holds something else than what it should."""
    if is_constant(actual):
        return WeightFate("never_loaded", Fate.FILLED, _one_number(expected, actual))
    return WeightFate("never_loaded", Fate.UNRELATED, _spreads(expected, actual))


def _one_number(expected: WeightPrint, actual: WeightPrint) -> dict[str, float]:
    low, high = expected.stats["min"], expected.stats["max"]
    return {"value": actual.stats["min"], "low": low, "high": high}


def _spreads(expected: WeightPrint, actual: WeightPrint) -> dict[str, float]:
    return {"spread": actual.stats["std"], "expected": expected.stats["std"]}


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


def summed(expected: WeightPrint, actual: WeightPrint) -> bool:
    """Return whether each row of a tensor is the sum of all rows, as far as its mean tells."""
    rows, count = actual.shape[0] if actual.shape else 0, elements([actual])
    if len(actual.shape) < 2 or rows < 2 or actual.shape != expected.shape:
        return False
    # Rows alike are rounded alike, each number by half a step of bfloat16 at most.
    size = actual.stats["l2"] / math.sqrt(count)
    room = size / 256 / math.sqrt(count / rows)
    return abs(actual.stats["mean"] - rows * expected.stats["mean"]) <= room


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
