"""Say in words what is wrong with the weights that a graph used."""

from __future__ import annotations

from layerparity.ground.numeral import numeral, percent
from layerparity.record.verdict import Verdict
from layerparity.record.weights import Fate, WeightFinding

_MOST = 12
# Numbers of a finding that count rows.
_COUNTS = ("first", "last", "length")
# A smaller change than this is not known from a sketch.
_LEAST_CHANGE = 1e-4
_CONSTANT = "never loaded: all {value} where the checkpoint holds {low} to {high}"
_UNSCALED = "is up to {largest} instead of {expected}: its {lacks} was "
# What follows the tensor's name, with the numbers of its fate in their places.
_SENTENCES = {
    Fate.NEVER_LOADED: "never loaded",
    Fate.MISSING: "was loaded, but nothing in the graph holds it",
    Fate.FILLED: _CONSTANT,
    Fate.FROZEN: f"{_CONSTANT} (a constant of the graph, or never filled)",
    Fate.UNRELATED: "never loaded: its values (spread {spread}) have nothing to do with the "
    "checkpoint's (spread {expected})",
    Fate.UNPACKED: "holds other values, of about the right spread ({spread}; {expected} is right): "
    "unpacked in another way, or never loaded",
    Fate.ANOTHER: "holds the values of {whose}",
    Fate.MIXED_ROWS: "holds other rows: {holds} were fused or split in the wrong order",
    Fate.OTHER_ORDER: "holds the checkpoint's values in another order",
    Fate.NOT_GOLDEN: "does not hold the values that the golden holds",
    Fate.NOT_FINITE: "holds NaN or Inf",
    Fate.SCALE_DROPPED: f"{_UNSCALED}dropped",
    Fate.SCALE_UNUSED: f"{_UNSCALED}not multiplied by",
    Fate.AVERAGED: "changed: averaged, its spread fell from {expected} to {spread}",
    Fate.SLICED: "was cut: {first:.0f} to {last:.0f} of {length:.0f} alone are the checkpoint's",
    Fate.CHANGED: "changed by {size}, its norm by a factor of {factor}",
}


def finding_text(finding: WeightFinding) -> str:
    """Return a finding whole: ``layers.0.mlp.gate: e_score_correction_bias never loaded``."""
    if finding.fate is Fate.ROUNDED:
        dtypes = " to ".join(finding.dtypes)
        return f"{finding.side}: {finding.count} tensors were rounded from {dtypes}"
    whose = "" if finding.side == "candidate" else f"{finding.side}: "
    many = len(finding.experts)
    of = f" of {many} experts" if many > 1 else "".join(f" of expert {n}" for n in finding.experts)
    change = finding.numbers.get("change", 0.0)
    fate = _SENTENCES[finding.fate].format(
        **{k: v if k in _COUNTS else numeral(v, 4) for k, v in finding.numbers.items()},
        size=percent(change) if change > _LEAST_CHANGE else "less than 0.01 %",
        whose=", ".join(_short(each, finding.name) for each in finding.holds),
        holds=", ".join(finding.holds),
        lacks=finding.lacks,
    )
    return f"{whose}{finding.module}: {finding.tensor}{of} {fate}"


def _short(owner: str, name: str) -> str:
    """Return an owner's name without what it has in common with another's."""
    theirs, ours = owner.split("."), name.split(".")
    shared = 0
    while shared < min(len(theirs), len(ours)) - 1 and theirs[shared] == ours[shared]:
        shared += 1
    return ".".join(theirs[shared:]).removesuffix(".weight")


def weight_rows(verdict: Verdict) -> list[tuple[str, int, str]]:
    """Return what is wrong with the weights, worst first: what, how many tensors, where and how."""
    findings = sorted(verdict.weights, key=lambda each: not each.is_fault)
    rows = [
        (each.what.replace("_", " "), each.count, finding_text(each)) for each in findings[:_MOST]
    ]
    rest = findings[_MOST:]
    if rest:
        rows.append(("...", sum(each.count for each in rest), f"and {len(rest)} more findings"))
    return rows


def weight_lines(verdict: Verdict) -> list[str]:
    """Return a line for each of the first findings, for a caption."""
    return [f"weights: {text}" for _, _, text in weight_rows(verdict)]
