"""Weight kinds: in what way a tensor's values are not those it should hold, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.record.manifest import WeightPrint

_DIGITS = 4
_SEEN = 1e-4
_FP8, _FP8_LARGEST = "float8_e4m3fn", 448.0
# Scales are far below 1: weights without them are larger by more than this.
_UNSCALED = 8.0
_SCALE = "weight_scale_inv"


@dataclass(frozen=True)
class WeightFate:
    """What became of a tensor: ``what``, ``holds`` and ``lacks`` as of `WeightFinding`, and words.

    The words follow the tensor's name: ``never loaded``.
    """

    what: str
    words: str
    holds: tuple[str, ...] = ()
    lacks: str = ""


def altered(expected: WeightPrint, actual: WeightPrint) -> WeightFate:
    """Return what became of a tensor whose values are not those it should hold."""
    if is_constant(actual) and not is_constant(expected):
        why = "a constant of the graph, or never filled"
        return WeightFate("constant", f"never loaded: {instead(expected, actual)} ({why})")
    if same_values([expected], [actual]) and is_visible(expected, actual):
        return WeightFate("reordered", "holds the checkpoint's values in another order")
    return _change(expected, actual)


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
        return WeightFate("changed_value", "holds NaN or Inf")
    right, own = (max(-each.stats["min"], each.stats["max"]) for each in (expected, actual))
    if actual.stored == _FP8 and own > _UNSCALED * right:
        # Scaled to the type's whole range, the largest number as stored is its largest.
        fate = "dropped" if _FP8_LARGEST / 2 < own <= _FP8_LARGEST else "not multiplied by"
        largest = f"is up to {_number(own)} instead of {_number(right)}"
        words = f"{largest}: its {_SCALE} was {fate}"
        return WeightFate("changed_value", words, lacks=_SCALE)
    if averaged(expected, actual) and not cosine(expected, actual) > 0.99:
        spread = f"{_number(expected.stats['std'])} to {_number(actual.stats['std'])}"
        return WeightFate("changed_value", f"changed: averaged, its spread fell from {spread}")
    if not related(expected, actual):
        return WeightFate("never_loaded", f"never loaded: {instead(expected, actual)}")
    change = relative_change(expected, actual)
    scale = actual.stats["l2"] / expected.stats["l2"] if expected.stats["l2"] else 0.0
    size = f"{100 * change:.2g} %" if change > _SEEN else "less than 0.01 %"
    words = f"changed by {size}, its norm by a factor of {scale:.{_DIGITS}g}"
    return WeightFate("changed_value", words)


def is_visible(expected: WeightPrint, actual: WeightPrint) -> bool:
    """Return whether two tensors differ by more than the five digits of a sketch."""
    return relative_change(expected, actual) > _SEEN


def instead(expected: WeightPrint, actual: WeightPrint) -> str:
    """Return what a tensor holds instead of what it should."""
    low, high = (_number(expected.stats[end]) for end in ("min", "max"))
    if is_constant(actual):
        return f"all {_number(actual.stats['min'])} where the checkpoint holds {low} to {high}"
    return (
        f"its values (spread {_number(actual.stats['std'])}) have nothing to do with the "
        f"checkpoint's (spread {_number(expected.stats['std'])})"
    )


def _number(value: float) -> str:
    return f"{value:.{_DIGITS}g}"


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
