"""The metrics as a reader meets them, in reading order, and their limits in words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from layerparity.compare.report.calibrated_measures import CALIBRATED
from layerparity.compare.report.measure import Measure, numeral
from layerparity.site import Kind
from layerparity.verdict import Row

MEASURES = (
    Measure(
        "rel_l2",
        "rel L2",
        "‖candidate − golden‖ / ‖golden‖, over all elements.",
        against="golden",
    ),
    Measure("max_abs_diff", "max |Δ|", "Largest absolute difference of one element."),
    Measure("mean_abs_diff", "mean |Δ|", "Mean of the absolute differences."),
    Measure("median_abs_diff", "median |Δ|", "Median of the absolute differences, to 0.4 %."),
    Measure("std_abs_diff", "std |Δ|", "Standard deviation of the absolute differences."),
    Measure(
        "cosine_distance",
        "1 − cosine",
        "One minus the cosine of the angle between the two tensors. Blind to scale: "
        "read it with the norm ratio.",
    ),
    Measure(
        "pearson",
        "Pearson",
        "Linear correlation of the elements. Blind to scale and offset.",
        ideal=1.0,
        bound="above",
    ),
    Measure(
        "similarity_percentage",
        "similar %",
        "Percentage of the elements with |Δ| ≤ 0.00001 + 1 % of the golden's value. It falls "
        "quickly in bfloat16 although nothing is wrong.",
        ideal=100.0,
        bound="above",
    ),
    Measure("norm_ratio", "norm ratio", "‖candidate‖ / ‖golden‖.", ideal=1.0, bound="within"),
    Measure(
        "snr_db",
        "SNR dB",
        "Signal to noise: 20·log₁₀(‖golden‖ / ‖candidate − golden‖). 6 dB are one bit; it ends at "
        "320 dB, which is no difference at all.",
        ideal=math.inf,
        bound="above",
    ),
    Measure(
        "ulp_distance",
        "ULP",
        "Largest distance of one element, in representable numbers of the candidate's dtype.",
        wrong=1e5,
    ),
    Measure(
        "nonfinite_disagreement",
        "NaN/Inf Δ",
        "Elements that are NaN or infinite on one side only, or differently.",
    ),
    Measure("unequal", "unequal", "Elements that are not the same to the bit."),
    Measure(
        "set_agreement",
        "set agreement",
        "Share of the tokens whose sets of chosen experts are equal; their order is not looked at.",
        ideal=1.0,
        bound="above",
    ),
    *(
        Measure(f"{side}_{name}", f"{side} {words}", f"{meaning} in the {side}.", detail=True)
        for side in ("golden", "candidate")
        for name, words, meaning in (
            ("constant", "is all", "The number that every element is"),
            ("denormal", "denormal", "Every element is next to zero, below the normal numbers,"),
            ("nonfinite", "NaN/Inf", "No element is a finite number"),
        )
    ),
    *CALIBRATED,
)
BY_NAME = {measure.name: measure for measure in MEASURES}
REL_L2 = BY_NAME["rel_l2"]
# Which group is meant, and how many: words beside another metric.
_BESIDE = ("_index", "_count")


def present(rows: Iterable[Row]) -> list[Measure]:
    """Return the measures that some row has: the known ones in reading order, then any others."""
    names = {name for row in rows for name in row.metrics if not name.endswith(_BESIDE)}
    known = [measure for measure in MEASURES if measure.name in names]
    others = sorted(names - BY_NAME.keys())
    return known + [Measure(name, name.replace("_", " "), "") for name in others]


def compared(rows: Iterable[Row]) -> list[Measure]:
    """Return the measures that some row has and that sites are compared by, without details."""
    return [measure for measure in present(rows) if not measure.detail]


def which(row: Row, measure: Measure) -> str:
    """Return which group a worst value belongs to, ``head 3``; empty where it has no group."""
    index = row.metrics.get(f"{measure.name.removesuffix('_z')}_index")
    group = measure.label.rpartition("worst ")[2]
    return "" if index is None else f"{group} {index:.0f}"


def beyond(row: Row, measure: Measure, limits: dict[str, float]) -> bool:
    """Say whether a row's value breaks its limit; the limits speak of real numbers only."""
    if row.kind is not Kind.REAL or measure.name not in limits or measure.name not in BY_NAME:
        return False
    return measure.beyond(row.metrics[measure.name], limits[measure.name])


def limit_text(name: str, limit: float) -> str:
    """Write a metric's limit in words, such as ``max |Δ| below 0.01``."""
    measure = BY_NAME.get(name)
    return f"{measure.label} {measure.side(limit)}" if measure else f"{name} {numeral(limit)}"
