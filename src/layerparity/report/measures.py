"""The metrics as a reader meets them, and what of them is shown of a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from layerparity.ground.numeral import numeral
from layerparity.record.verdict import FAR_OFF, SIMILARITIES, SUPPOSED, Row, Verdict
from layerparity.report.measure import Measure

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
        unit="floors",
    ),
    *(
        Measure(
            f"error_ratio_{group}",
            f"R, worst {group}",
            f"The same for the {group} in which it is largest.",
            wrong=100.0,
            detail=True,
            group=group,
            unit="floors",
        )
        for group in _GROUPS
    ),
    Measure(
        "golden_error_ratio",
        "golden's own R",
        "‖golden − reference‖ over the noise floor.",
        wrong=100.0,
        detail=True,
        unit="floors",
    ),
    Measure(
        FAR_OFF,
        "R, golden's dtype",
        "‖candidate − reference‖ over the noise floor of the golden's narrower dtype, where there "
        "is none of the candidate's: it fails by that alone, and never passes.",
        wrong=100.0,
        detail=True,
        unit="floors",
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
        unit="σ",
    ),
    *(
        Measure(
            f"slope_{group}{end}",
            f"slope{words}, worst {group}",
            f"The same for the {group} in which it is most significant.",
            bound="jointly",
            detail=True,
            group=group,
            unit="σ" if end else "",
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
        group="channel",
        unit="σ",
    ),
    *(
        Measure(
            f"slope_token{head}{end}",
            f"slope {by}{words}",
            meaning,
            bound="jointly",
            detail=True,
        )
        for head, by in (("", "by token"), ("_head", "by token and head"))
        for end, words, meaning in (
            ("", "", "One factor for all numbers of a token (of each of its heads): RMS over all."),
            ("_ratio", ", ratio", "The same over what clean computations of such an error show."),
        )
    ),
    Measure(
        "outlier",
        "outlier",
        "The error of the token that stands out most, over its floor.",
        bound="jointly",
        detail=True,
        group="position",
        unit="floors",
    ),
    Measure(
        "outlier_z",
        "outlier z",
        "How far it stands out of the candidate's other tokens, in standard deviations.",
        bound="jointly",
        detail=True,
        group="position",
        unit="σ",
    ),
    Measure(
        "offset",
        "offset",
        "A constant that is added to every element, in noise floors.",
        bound="jointly",
        detail=True,
        unit="floors",
    ),
    Measure(
        "offset_z",
        "offset z",
        "The offset in standard errors.",
        bound="jointly",
        detail=True,
        unit="σ",
    ),
    Measure(
        "flips", "flips", "Tokens that were sent to other experts.", detail=True, unit="tokens"
    ),
    Measure(
        "flips_outside_noise",
        "flips, no ties",
        "Those of them whose scores in the reference were too far apart for rounding.",
        unit="tokens",
    ),
    Measure(
        "tie_margin",
        "tie margin",
        "Smallest gap, in the reference, of scores that were chosen otherwise.",
        detail=True,
    ),
    Measure(
        SUPPOSED,
        "may be routed apart",
        "Tokens that stand out within a tie of a router that nobody saw: they are left out.",
        detail=True,
        unit="tokens",
    ),
    Measure(
        "agreeing_tokens",
        "tokens judged",
        "Share of the real tokens that both sides routed alike: only those are judged.",
        ideal=1.0,
        bound="above",
        detail=True,
        part=True,
    ),
)

_KL = "of the candidate's next-token distribution from the golden's, Σ p·(log p − log q), in nats"
_LOGP = "|log q − log p| of the golden's own next tokens, in nats"
_TOP = "Largest error among the {} logits, over the largest of them, less a common shift."
_END = (
    ("kl_mean", "KL mean", f"Mean KL divergence {_KL}.", 0.0),
    ("kl_p99", "KL 99 %", "The KL divergence that 99 % of the tokens are below.", 0.0),
    ("kl_max", "KL max", "The largest KL divergence of a token.", 0.0),
    ("top1_agreement", "top-1", "Share of the tokens with the same likeliest next token.", 1.0),
    *(
        (f"top_{n}_error", f"top-{n} error", _TOP.format(f"{n} likeliest"), 0.0)
        for n in (5, 50, 1000)
    ),
    ("top_all_error", "error of all", _TOP.format("golden's"), 0.0),
    ("logp_mean", "|Δ log p| mean", f"Mean of {_LOGP}.", 0.0),
    ("logp_max", "|Δ log p| max", f"Largest {_LOGP}.", 0.0),
    ("perplexity_ratio", "perplexity ratio", "The candidate's perplexity over the golden's.", 1.0),
    ("nmse", "NMSE", "Σ(candidate − golden)² / Σ golden².", 0.0),
)
_CLEAN = "over the largest of clean computations"
_OVER = {
    **dict.fromkeys(("kl_mean", "kl_p99", "kl_max", "nmse"), f"The root of it {_CLEAN}."),
    "top1_agreement": f"The share of tokens with another likeliest next one, {_CLEAN}.",
    "perplexity_ratio": f"How far the logarithms of both perplexities are apart, {_CLEAN}.",
}
# What is said of logits alone.
AT_THE_END = (
    *(
        Measure(
            name,
            label,
            meaning,
            ideal,
            "above" if name in SIMILARITIES else "within" if ideal else "below",
            detail=True,
            part=name in SIMILARITIES,
            unit="nats" if name.startswith(("kl_", "logp_")) else "",
        )
        for name, label, meaning, ideal in _END
    ),
    *(
        Measure(
            f"{name}_ratio",
            f"{label}, over clean",
            _OVER.get(name, f"The same {_CLEAN}."),
            wrong=100.0,
            detail=True,
        )
        for name, label, _, _ in _END
    ),
)


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
    Measure(
        "std_abs_diff", "std |Δ|", "Standard deviation of the absolute differences (of a sample)."
    ),
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
        "Percentage of the elements with |Δ| ≤ atol + rtol·|candidate|, as torch.isclose has it. "
        "It falls quickly in bfloat16 although nothing is wrong.",
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
        unit="elements",
    ),
    Measure(
        "replicas_apart",
        "replicas",
        "The largest distance of two of the ranks' replicas of one tensor, over its norm.",
        detail=True,
    ),
    Measure("unequal", "unequal", "Elements that are not the same to the bit.", unit="elements"),
    Measure(
        "set_agreement",
        "set agreement",
        "Share of the tokens whose sets of chosen experts are equal; their order is not looked at.",
        ideal=1.0,
        bound="above",
        part=True,
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
    *AT_THE_END,
    *CALIBRATED,
)
BY_NAME = {measure.name: measure for measure in MEASURES}
REL_L2 = BY_NAME["rel_l2"]
# Which group is meant, and how many: words beside another metric.
_BESIDE = ("_index", "_count", "_sequence")


def present(rows: Iterable[Row]) -> list[Measure]:
    """Return the measures that some row has: the known ones in reading order, then any others."""
    names = {name for row in rows for name in row.metrics if not name.endswith(_BESIDE)}
    known = [measure for measure in MEASURES if measure.name in names]
    others = sorted(names - BY_NAME.keys())
    return known + [Measure(name, name.replace("_", " "), "") for name in others]


def compared(rows: Iterable[Row]) -> list[Measure]:
    """Return the measures that some row has and that sites are compared by.

    Details are left out, but for those whose limit some row broke.
    """
    rows = list(rows)
    broken = {breach.metric for row in rows for breach in row.breaches}
    return [each for each in present(rows) if not each.detail or each.name in broken]


def which(row: Row, measure: Measure) -> str:
    """Return which group a worst value belongs to, ``head 3``; empty where it has no group."""
    index = row.metrics.get(f"{measure.name.removesuffix('_z')}_index")
    return "" if index is None or not measure.group else f"{measure.group} {index:.0f}"


def beyond(row: Row, measure: Measure) -> bool:
    """Say whether a row broke its limit on a measure: what was not judged breaks none."""
    return any(breach.metric == measure.name for breach in row.breaches)


def cells_of(row: Row, measures: Sequence[Measure]) -> list[tuple[str | None, bool]]:
    """Return a row's numbers as text, in the order of ``measures``, and whether each is beyond.

    None where the row has no such number.
    """
    broken = {breach.metric for breach in row.breaches}
    return [
        (
            each.show(row.metrics[each.name]) if each.name in row.metrics else None,
            each.name in broken,
        )
        for each in measures
    ]


# A limit that several metrics share.
_OF_SEVERAL = {
    "end_ratio": "each number of the logits, over clean ways,",
    "end_ratio_token": "those that one token decides",
}


def limits_texts(verdict: Verdict) -> list[str]:
    """Return the limits of a verdict in words, and what it counts as similar where that is one."""
    texts = [limit_text(name, limit) for name, limit in verdict.limits.items()]
    if "similarity_percentage" in verdict.limits:
        close = verdict.closeness
        texts.append(f"similar: |Δ| ≤ {close.atol:g} + {close.rtol:g}·|candidate|")
    return texts


def limit_text(name: str, limit: float) -> str:
    """Write a metric's limit in words, such as ``max |Δ| below 0.01``."""
    if name in _OF_SEVERAL:
        return f"{_OF_SEVERAL[name]} up to {numeral(limit)}"
    measure = BY_NAME.get(name)
    return f"{measure.label} {measure.side(limit)}" if measure else f"{name} {numeral(limit)}"
