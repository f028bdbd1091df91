"""Evidence beside the sites: what the weights say, and what was never exercised, as plain lines."""

from __future__ import annotations

from collections.abc import Iterator

from layerparity.compare.comparison import Comparison
from layerparity.compare.findings import ExpertUse, WeightFinding

_MOST = 12


def weight_rows(comparison: Comparison) -> list[tuple[str, int, str]]:
    """Return what is wrong with the weights, worst first: what, how many tensors, where and how."""
    found = sorted(comparison.weights, key=lambda each: not each.is_fault)
    rows = [(_word(each), each.count, each.text) for each in found[:_MOST]]
    rest = found[_MOST:]
    if rest:
        rows.append(("...", sum(each.count for each in rest), f"and {len(rest)} more findings"))
    return rows


def weight_lines(comparison: Comparison) -> list[str]:
    """Return a line for each of the first findings, for a caption."""
    return [f"weights: {text}" for _, _, text in weight_rows(comparison)]


def coverage_lines(comparison: Comparison) -> list[str]:
    """Return what was exercised of layer classes, experts and steps, where there is a choice."""
    return [*_classes(comparison), *_experts(comparison), *_steps(comparison)]


def _word(finding: WeightFinding) -> str:
    return finding.what.replace("_", " ")


def _classes(comparison: Comparison) -> Iterator[str]:
    classes = comparison.coverage.classes
    if len(classes) > 1:
        parts = (f"{each.name} {len(each.judged)} of {len(each.layers)}" for each in classes)
        yield f"layers judged by class: {', '.join(parts)}"


def _experts(comparison: Comparison) -> Iterator[str]:
    uses = comparison.coverage.experts
    if not uses:
        return
    exercised, total = sum(use.exercised for use in uses), sum(use.total for use in uses)
    where = f"{len(uses)} block{'' if len(uses) == 1 else 's'}"
    yield f"experts exercised: {exercised} of {total} in {where}{_others(uses)}"


def _others(uses: tuple[ExpertUse, ...]) -> str:
    vouched = sum(len(use.by_weights) for use in uses)
    never = sum(len(use.never) for use in uses)
    words = f", {vouched} more covered by weights" if vouched else ""
    return words + (f", {never} never" if never else "")


def _steps(comparison: Comparison) -> Iterator[str]:
    for phase, (held, judged) in comparison.coverage.steps.items():
        if judged < held:
            words = "" if judged else ", never exercised"
            yield f"{phase}: {judged} of {held} steps judged{words}"
