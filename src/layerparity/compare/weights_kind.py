"""Weight kinds: in what way a tensor's values are not those it should hold, in words."""

from __future__ import annotations

import math

from layerparity.compare.weights_sketch import (
    averaged,
    cosine,
    related,
    relative_change,
    same_values,
)
from layerparity.manifest import WeightPrint

_DIGITS = 4
_SEEN = 1e-4
_FP8, _FP8_LARGEST = "float8_e4m3fn", 448.0
# Scales are far below 1: weights without them are larger by more than this.
_UNSCALED = 8.0


def altered(expected: WeightPrint, actual: WeightPrint) -> tuple[str, str]:
    """Return what became of a tensor, one of `WeightFinding.what`, and that in words."""
    if is_constant(actual) and not is_constant(expected):
        why = "a constant of the graph, or never filled"
        return "constant", f"never loaded: {instead(expected, actual)} ({why})"
    if same_values([expected], [actual]) and is_visible(expected, actual):
        return "reordered", "holds the checkpoint's values in another order"
    return _changed(expected, actual)


def is_constant(print_: WeightPrint) -> bool:
    """Return whether all values of a tensor are one."""
    ends = print_.stats
    return "min" in ends and ends["min"] == ends["max"]


def is_finite(print_: WeightPrint) -> bool:
    """Return whether a tensor holds neither NaN nor Inf."""
    return math.isfinite(print_.stats["l2"])


def _changed(expected: WeightPrint, actual: WeightPrint) -> tuple[str, str]:
    if not is_finite(actual):
        return "changed_value", "holds NaN or Inf"
    unscaled = _unscaled(expected, actual)
    if unscaled:
        return "changed_value", unscaled
    if averaged(expected, actual) and not cosine(expected, actual) > 0.99:
        spread = f"{_number(expected.stats['std'])} to {_number(actual.stats['std'])}"
        return "changed_value", f"changed: averaged, its spread fell from {spread}"
    if not related(expected, actual):
        return "never_loaded", f"never loaded: {instead(expected, actual)}"
    change = relative_change(expected, actual)
    scale = actual.stats["l2"] / expected.stats["l2"] if expected.stats["l2"] else 0.0
    size = f"{100 * change:.2g} %" if change > _SEEN else "less than 0.01 %"
    return "changed_value", f"changed by {size}, its norm by a factor of {scale:.{_DIGITS}g}"


def _unscaled(expected: WeightPrint, actual: WeightPrint) -> str:
    """Return what happened to the scales of a weight stored in FP8, if that is what is wrong."""
    right, held = (max(-p.stats["min"], p.stats["max"]) for p in (expected, actual))
    if actual.stored != _FP8 or not held > _UNSCALED * right:
        return ""
    # Scaled to the type's whole range, the largest number as stored is its largest.
    done = "dropped" if _FP8_LARGEST / 2 < held <= _FP8_LARGEST else "not multiplied by"
    return f"is up to {_number(held)} instead of {_number(right)}: its weight_scale_inv was {done}"


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
