"""Say in words why a site ended as it did."""

from __future__ import annotations

import math

from layerparity.anatomy.site import Kind
from layerparity.ground.numeral import numeral, percent, signed
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Breach, Row
from layerparity.report.measures import BY_NAME

_NO_STEP = "the {side} ran no {phase} step"
_SHAPE = "shape [{golden}] against [{candidate}]"
_ROUTED = "only {share} of the tokens were routed alike: use port.replay=true"
# What the two were not computed from alike. Of a digest, the first digits do.
_STARTS = {
    ReasonKind.FEED_UNKNOWN: "nothing says what {stage} was fed",
    ReasonKind.OTHER_FEED: "fed different values at {site} ({golden:.8} against {candidate:.8})",
    ReasonKind.FEED_NOT_HELD: "the golden does not hold {site}, which {stage} was fed",
    ReasonKind.OTHER_STAGE: "the golden passed {golden} where the candidate passed {candidate}",
    ReasonKind.EXTRA_STAGE: "only the {side} passed {stage}",
    ReasonKind.OTHER_START: "the golden's chain starts at {golden_site} ({golden:.8}), fed to "
    "{stage} from outside; the candidate's at {candidate_site} ({candidate:.8})",
    ReasonKind.OTHER_WEIGHTS: "weights of {stage}",
    ReasonKind.OTHER_TENSOR: "weights of {stage} ({name})",
    ReasonKind.OTHER_TENSORS: "weights of {stage} ({name} and {others} more)",
    ReasonKind.WEIGHTS_UNKNOWN: "weights of {stage}, which the {side} has no fingerprint of",
}
# With a reason's values in their places; those of a list are separated by commas.
_SENTENCES = {
    **{kind: f"not the same start: {said}" for kind, said in _STARTS.items()},
    ReasonKind.NOT_CAPTURED: "not captured",
    ReasonKind.SKIPPED: "{text}",
    ReasonKind.NOT_CAPTURED_BY_GOLDEN: "not captured by the golden",
    ReasonKind.SKIPPED_BY_GOLDEN: "not captured by the golden: {text}",
    ReasonKind.NOT_ASKED_FOR: "not captured by the candidate (capture={capture})",
    ReasonKind.NO_STEP: f"{_NO_STEP} {{step}}",
    ReasonKind.NOT_RUN: "the golden did not run this part of the model",
    ReasonKind.LOST: "the candidate covers it but holds no tensor of it",
    ReasonKind.NOT_SHOWN: "a value of transformers' own modules, which the candidate's port does "
    "not show",
    ReasonKind.NOT_FED: "the candidate did not record {site}, which {stage} is fed",
    ReasonKind.INTEGERS: "the {side} holds {dtype} numbers where real numbers are due: dump it as "
    "floats",
    ReasonKind.INTEGERS_TWICE: "the golden holds {golden} numbers and the candidate holds "
    "{candidate} numbers where real numbers are due: dump them as floats",
    ReasonKind.SHAPE: _SHAPE,
    ReasonKind.OTHER_SIZE: f"{_SHAPE}: not as many by {{axes}}",
    ReasonKind.ONE_ELEMENT: f"{_SHAPE}: the {{side}}'s tensor holds one element",
    ReasonKind.EMPTY: f"{_SHAPE}: the {{side}}'s tensor is empty",
    ReasonKind.TRANSPOSED: f"{_SHAPE}: one is a transposed layout of the other",
    ReasonKind.PADDED: f"{_SHAPE}: one looks like the other padded",
    ReasonKind.AXES: "axes ({golden}) against ({candidate})",
    ReasonKind.KIND: "{golden} numbers against {candidate}",
    ReasonKind.MASK_SHAPE: "attention mask [{mask}] against [{tensor}]",
    ReasonKind.NO_SET_AGREES: "no token's expert set agrees",
    ReasonKind.NO_ELEMENT: "no element to compare",
    ReasonKind.NO_REFERENCE: "the golden has no reference to judge by: make it on backend=gpu "
    "with port=hf",
    ReasonKind.CANDIDATE_IS_DUMP: "the candidate is a dump: nothing says what its blocks were fed; "
    "use tolerance=fixed",
    ReasonKind.NO_FLOOR_OF_CHAIN: "fed by its own chain, whose rounding has no floor here: compare "
    "with feed=isolated",
    ReasonKind.NO_REFERENCE_ALONE: "the golden has no reference of {stage} alone: make it with "
    "capture=components",
    ReasonKind.NO_FLOOR_OF_DTYPE: "the golden has no noise floor for {dtype}: make it with "
    "reference.dtypes",
    ReasonKind.NO_FLOOR_OF_OPERANDS: "the golden has no noise floor for {dtype} of {operands} "
    "operands: make it with operands",
    ReasonKind.GOLDEN_OFF: "the golden is itself {times} times as far off its reference as clean "
    "computations are: make it again, on another device or with another attn_implementation",
    ReasonKind.ROUTED_APART: _ROUTED,
    ReasonKind.ROUTED_APART_IN_CHAIN: f"{_ROUTED}, or feed=isolated",
    ReasonKind.UNSEEN_ROUTING: "only {share} of the tokens are surely routed alike, as the "
    "candidate shows no choices: use capture=components, or feed=isolated",
    ReasonKind.ROUNDING_UNKNOWN: "nothing says how large its rounding may be",
    ReasonKind.BOTH_CONSTANT: "each side is one number throughout, such as 0: that they agree "
    "proves nothing",
    ReasonKind.BOTH_REPEATED: "all tokens have the same numbers on each side: that they agree "
    "proves nothing",
    ReasonKind.BOTH_FLAT: "each token has one number throughout on each side, as of a weight whose "
    "rows are all the same: that they agree proves nothing",
    ReasonKind.TIES: "routed apart by a tie; {share} of the tokens of such steps are judged",
    ReasonKind.UNSEEN_TIES: "the candidate does not show its router's choices: this token is near "
    "a tie, and off as if another expert had been chosen; {share} of the tokens of such steps are "
    "judged",
    ReasonKind.NO_RESIDUAL: "these are hidden states without their residual, and the map names the "
    "wrong tensor: the first block's :out is {site}; name it so, and dump the sum of the two",
    ReasonKind.FOLDED: "everything is {factor} times the golden's, and {site}, which is computed "
    "from it, is right: the factor is a convention of this implementation",
    ReasonKind.INSIDE_UNJUDGED: "block output alone cannot show a bug inside; not judged: {sites}",
    ReasonKind.BLOCK_ALONE: "block output alone cannot show a bug inside; use capture=default, or "
    "dump what is inside",
}


def reason(row: Row, most: int | None = None) -> str:
    """Return why a site ended as it did; empty for one that passes.

    Of the limits that it broke the first ``most`` are said, all by default, and the rest counted.
    """
    if row.why is not None or not row.breaches:
        return reason_text(row.why) if row.why is not None else ""
    said = row.breaches[:most]
    rest = len(row.breaches) - len(said)
    more = [f"{rest} more limit{'' if rest == 1 else 's'}"] if rest else []
    broken = "; ".join([*(breach_text(each, row.metrics) for each in said), *more])
    return f"an exact site: {broken}" if row.kind is Kind.EXACT else broken


def reason_text(why: Reason) -> str:
    """Return why a site was not judged, as a sentence."""
    return _filled(_SENTENCES[why.kind], why)


def start_text(why: Reason) -> str:
    """Return what two sides were not computed from alike, without saying that this is the reason.

    Raises KeyError for a reason of another kind.
    """
    return _filled(_STARTS[why.kind], why)


def reason_of_steps(row: Row) -> str:
    """Return `reason` in the words that all steps of a phase share which were left out alike."""
    if row.why is not None and row.why.kind is ReasonKind.NO_STEP:
        return _filled(_NO_STEP, row.why)
    return reason(row)


def _filled(sentence: str, why: Reason) -> str:
    return sentence.format(**{name: _said(name, each) for name, each in why.values.items()})


# Values that are numbers, where others are shares.
_NUMBERS = ("times", "factor")


def _said(name: str, value: object) -> object:
    """Return a reason's value as a sentence has it: a list with commas, a share as a percentage."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if not isinstance(value, float):
        return value
    return numeral(value) if name in _NUMBERS else percent(value)


def breach_text(breach: Breach, metrics: dict[str, float]) -> str:
    """Return which limit was broken and by how much; ``metrics`` are those of the site."""
    name, value = breach.metric, math.nan if breach.value is None else breach.value
    limit = breach.limit if breach.limit is not None else 0.0
    group = BY_NAME[name].group if name in BY_NAME else ""
    if name.startswith("error_ratio"):
        where = f" at {group} {breach.group}" if breach.group is not None else ""
        if f"{name}_sequence" in metrics:
            where += f" of prompt {metrics[f'{name}_sequence']:.0f}"
        return f"error{where} is {numeral(value)} times the noise floor (limit {numeral(limit)})"
    if name.startswith("slope_token"):
        whose = "each head of a token" if name.endswith("head") else "each token"
        ratio = metrics.get(f"{name}_ratio", math.nan)
        return (
            f"{whose} has a factor of its own, off by {percent(value)} (RMS), {numeral(ratio)} "
            "times what clean computations show"
        )
    if name.startswith("slope"):
        where = f" of {group} {breach.group}" if breach.group is not None else ""
        z = metrics.get(f"{name}_z", math.nan)
        return f"a factor{where} is off by {signed(100 * value)} %, {numeral(z)} standard errors"
    plain = {
        "norm_ratio": f"norm is off by {percent(abs(value - 1.0))}",
        "outlier": f"the error of token {breach.group} stands out: {numeral(value)} times its "
        f"floor, {numeral(metrics.get('outlier_z', math.nan))} standard deviations from the other "
        "tokens'",
        "offset": f"an offset of {signed(value)} noise floors, "
        f"{numeral(metrics.get('offset_z', math.nan))} standard errors",
        "flips_outside_noise": f"{value:.0f} of {metrics.get('flips', 0.0):.0f} flips are no ties",
        "set_agreement": f"what is chosen differs at {percent(1.0 - value)} of the tokens",
        "unequal": f"{value:.0f} values are not equal to the bit",
        "replicas_apart": f"the replicas that ranks hold of it differ by {percent(value)}",
        "nonfinite_disagreement": f"{value:.0f} values are NaN or Inf on one side only",
    }
    if name in plain:
        return plain[name]
    if breach.is_under_floor:
        short = f"{numeral(limit - value)} short of it"
        return f"{name} {numeral(value, 6)} is not over {numeral(limit, 6)}, {short}"
    times = f", {numeral(value / limit)} times it" if limit else ""
    return f"{name} {numeral(value, 4)} is not under {numeral(limit, 4)}{times}"
