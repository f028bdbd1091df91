"""Say in words what to know before trusting a verdict: cautions, silent ports, doubts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerparity.anatomy.mechanism import Mechanism
from layerparity.record.findings import (
    Caution,
    CautionKind,
    Coverage,
    Doubt,
    DoubtKind,
    UnfinishedSweep,
)
from layerparity.record.verdict import Verdict

# With a caution's side and values in their places.
_CAUTIONS = {
    CautionKind.UNNAMED_TENSORS: "{file} names no site for {count} tensors of '{run}', such as "
    "{example}: they are left out.",
    CautionKind.DAMAGED_PROFILE: "{text}",
    CautionKind.REPEATED_SITES: "{count} sites stand in more than one run (such as {site}): the "
    "newest counts, there '{run}'.",
    CautionKind.SAME_EXPERIMENT: "Both sides are the same experiment ({backend} on {device}, port "
    "{port}, {dtype}): that they agree shows only that it repeats itself.",
    CautionKind.OBSERVING_CHANGES: "Both sides are one experiment that observes other sites, and "
    "yet {site} is not equal to the bit ({count} such): observing changes what is computed, or the "
    "runs had other numbers of threads.",
    CautionKind.NO_FINGERPRINTS: "The {side} is a dump without fingerprints: nothing proves that "
    "both were fed the same inputs and had the same weights.",
    CautionKind.SYNTHETIC_INPUTS: "The {side}'s inputs are synthetic: real ones may show other "
    "errors.",
    CautionKind.ROUNDING_UNKNOWN: "The {tolerance} tolerance does not know how far 16-bit rounding "
    "goes: it may fail a correct run.",
    CautionKind.REPEATED_TENSOR: "The {side} shows to the bit the same tensor at {other} and at "
    "{site} ({count} such): it was observed twice, or one block's result served for both.",
    CautionKind.UNCHANGED_STEP: "The {side} shows to the bit the same tensor at {other} and at "
    "{site} ({count} such), though its block was fed other values: an old tensor was observed, or "
    "an old result served again.",
    CautionKind.NOISIER: "The candidate is noisier than the golden: at {site} its error against "
    "the reference is at least {times} times the golden's in all {blocks} blocks. Sums in several "
    "parts do that, and so does a narrower type.",
    CautionKind.GOLDEN_OF_A_PORT: "What is believed was not computed by transformers "
    "(port=hf): the golden is of port {port}. A mistake that both sides share does not show.",
    CautionKind.ROUNDED_OPERANDS: "The {side}'s products round their operands to {operands}: it is "
    "judged by the noise of that, and a fault smaller than it does not show.",
    CautionKind.NOT_ROUNDED: "The {side}'s products do not round their operands so: at {site} "
    "first, and at {count} of the {total} sites where that shows, it is as near to the reference "
    "as the golden is. Judge it without operands=, which is the sharper test.",
    CautionKind.ORIGINAL_WEIGHTS: "The golden computes with the original weights ({original}), and "
    "quantising alone moved them by {moved} % in the median: the floors hold that, and a fault "
    "smaller than it does not show. A golden without model.original= shows it.",
    CautionKind.OWN_VALUES: "Every site is judged on the {side}'s own values: the golden computed "
    "it from what the {side} recorded directly before it, so that what fails goes wrong there.",
}


def warning_lines(verdict: Verdict) -> list[str]:
    """Return what a reader should know before trusting the verdict."""
    silent = (
        f"The {role}'s port does not say what weights its graph holds." for role in verdict.silent
    )
    unfinished = (f"T{unfinished_text(each)[1:]}." for each in verdict.unfinished)
    cautions = (caution_text(each) for each in verdict.cautions)
    doubts = (doubt_text(each, verdict.coverage) for each in verdict.coverage.doubts)
    short = (short_text(each, verdict.coverage) for each in verdict.coverage.too_short_for)
    return [*cautions, *silent, *doubts, *short, *unfinished]


def unfinished_text(sweep: UnfinishedSweep) -> str:
    """Return that a sweep did not finish."""
    return f"the sweep {sweep.name} ended as {sweep.status}: what did not finish was not compared"


def caution_text(caution: Caution) -> str:
    """Return a caution as a sentence."""
    values = {
        name: f"{each:.2f}" if isinstance(each, float) else each
        for name, each in caution.values.items()
    }
    return _CAUTIONS[caution.kind].format(side=caution.side, **values)


# What is said of doubts without values, or with stages alone.
_ALWAYS = {
    DoubtKind.ATTENTION: (
        "no text has two different tokens: no query had two keys to choose from, and a wrong "
        "attention does not show; use a text of several words"
    ),
    DoubtKind.EMBEDDING: (
        "layer 0 was fed the candidate's own layers.0:in, and embed_tokens:out was not compared: a "
        "wrong embedding does not show; record embed_tokens:out"
    ),
    DoubtKind.ENDS: (
        "nothing that {stages} put out was seen: a fault there does not show; record "
        "{outputs}, or judge blocks alone (scope=range)"
    ),
}


def doubt_text(doubt: Doubt, coverage: Coverage) -> str:
    """Return what was never exercised; ``coverage`` is what the doubt is of."""
    values = doubt.values
    if doubt.kind is DoubtKind.LAYER_CLASSES:
        seen = " and ".join(each.name for each in coverage.classes if each.judged)
        only = f"only {seen} layers" if seen else "no layers"
        return f"{only} were compared; {layer_classes_text(values['names'], coverage)} never"
    if doubt.kind is DoubtKind.EXPERTS:
        return (
            f"layer {values['layer']}: experts {ranges(values['experts'])} were never exercised, "
            "and nothing shows that their weights are the same"
        )
    if doubt.kind is DoubtKind.ROUTING:
        layers = values["layers"]
        return (
            f"the router's choices of layer{'s' if len(layers) > 1 else ''} {ranges(layers)} were "
            "not observed: which experts got a token is not known, and nothing shows that the "
            "weights of all are the same"
        )
    if doubt.kind is DoubtKind.BLOCK_ENDS:
        layers = values["layers"]
        return (
            f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}: what the block puts out was "
            "nowhere seen (:out, or the next block's :in): a wrong residual add does not show"
        )
    if doubt.kind in _ALWAYS:
        stages = values.get("stages", [])
        outputs = ", ".join(f"{stage}:out" for stage in stages)
        return _ALWAYS[doubt.kind].format(stages=" and ".join(stages), outputs=outputs)
    asked = values["max_new_tokens"]
    return f"generate.max_new_tokens={asked} was asked for, and no decode step was compared"


def short_text(mechanism: Mechanism, coverage: Coverage) -> str:
    """Return that the texts were too short for something that the model does."""
    return (
        f"{mechanism_text(mechanism)} acts on texts of {mechanism.tokens} tokens and more, and the "
        f"longest had {coverage.longest}: it was not exercised"
    )


def mechanism_text(mechanism: Mechanism) -> str:
    """Return a mechanism with the blocks that have it: ``the sliding window (layers 0, 2)``."""
    layers = mechanism.layers
    where = f" (layer{'s' if len(layers) > 1 else ''} {ranges(layers)})" if layers else ""
    return f"{mechanism.name}{where}"


def layer_classes_text(names: Sequence[str], coverage: Coverage) -> str:
    """Return classes of layers with the layers that are of them: ``moe (layers 0, 2)``."""
    return ", ".join(
        f"{each.name} (layer{'s' if len(each.layers) > 1 else ''} {ranges(each.layers)})"
        for each in coverage.classes
        if each.name in names
    )


def ranges(numbers: Iterable[int]) -> str:
    """Return ``0..3, 5`` for 0, 1, 2, 3, 5; two neighbours stay two."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [[f"{r[0]}..{r[-1]}"] if len(r) > 2 else [str(n) for n in r] for r in runs]
    return ", ".join(text for part in parts for text in part)
