"""The metrics of calibrated tolerances: errors against the noise floor, slopes, routing."""

from __future__ import annotations

from layerparity.compare.report.measure import Measure

_GROUPS = ("head", "channel", "expert", "position")
_SLOPE = "of the slope of (candidate − golden) on the reference: a factor that is off by so much"
CALIBRATED = (
    Measure(
        "error_ratio",
        "R",
        "‖candidate − reference‖ over the noise floor: the largest such error of clean "
        "computations in the candidate's dtype.",
        wrong=100.0,
        against="reference",
    ),
    *(
        Measure(
            f"error_ratio_{group}",
            f"R, worst {group}",
            f"The same for the {group} in which it is largest.",
            wrong=100.0,
            detail=True,
        )
        for group in _GROUPS
    ),
    Measure(
        "golden_error_ratio",
        "golden's own R",
        "‖golden − reference‖ over the noise floor.",
        wrong=100.0,
        detail=True,
    ),
    Measure(
        "floor_rel_l2",
        "floor, rel L2",
        "The noise floor over ‖reference‖: what rounding alone explains.",
        detail=True,
    ),
    Measure("slope", "slope", f"Value {_SLOPE}.", bound="jointly"),
    Measure(
        "slope_z",
        "slope z",
        "The slope in standard errors, clean computations' own slopes included.",
        bound="jointly",
        wrong=100.0,
        detail=True,
    ),
    *(
        Measure(
            f"slope_{group}{end}",
            f"slope{words}, worst {group}",
            f"The same for the {group} in which it is most significant.",
            bound="jointly",
            detail=True,
        )
        for group in _GROUPS[:3]
        for end, words in (("", ""), ("_z", " z"))
    ),
    Measure(
        "slope_z_channel",
        "slope z, worst channel",
        "",
        bound="jointly",
        detail=True,
    ),
    Measure(
        "offset",
        "offset",
        "A constant that is added to every element, in noise floors.",
        bound="jointly",
        detail=True,
    ),
    Measure("offset_z", "offset z", "The offset in standard errors.", bound="jointly", detail=True),
    Measure("flips", "flips", "Tokens that were sent to other experts.", detail=True),
    Measure(
        "flips_outside_noise",
        "flips, no ties",
        "Those of them whose scores in the reference were too far apart for rounding.",
    ),
    Measure(
        "tie_margin",
        "tie margin",
        "Smallest gap, in the reference, of scores that were chosen otherwise.",
        detail=True,
    ),
    Measure(
        "agreeing_tokens",
        "tokens judged",
        "Share of the real tokens that both sides routed alike: only those are judged.",
        ideal=1.0,
        bound="above",
        detail=True,
    ),
)
