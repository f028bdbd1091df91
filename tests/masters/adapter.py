"""Adapter: the one place that knows where today's code keeps what a comparison concludes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from layerparity.anatomy.blocks import Blocks
from layerparity.ground import registry
from layerparity.judge.conclude import conclude as compare
from layerparity.judge.weights_diff import diff_side
from layerparity.record.guilt import Guilt
from layerparity.record.source import RunSource
from layerparity.record.stored_run import from_folder
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.record.weights import WeightCheck, WeightFinding
from layerparity.report import headline as words
from layerparity.report.cautions import doubt_text, warning_lines
from layerparity.report.reasons import reason


def conclude(
    golden: Sequence[Path], candidate: Sequence[Path], tolerance: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare stored folders, oldest first; return what is concluded as plain values.

    ``tolerance`` holds a tolerance's name and the limits that differ from its own. Without a golden
    the candidate's weights are held against the checkpoint, as ``what=weights`` does.
    """
    if not golden:
        return _weights(candidate)
    return concluded(verdict_of(golden, candidate, tolerance))


def verdict_of(
    golden: Sequence[Path],
    candidate: Sequence[Path],
    tolerance: Mapping[str, Any],
    *,
    portrait: bool = False,
) -> Verdict:
    """Compare stored folders, as `conclude` does."""
    left, right = ([from_folder(folder) for folder in side] for side in (golden, candidate))
    judged_by = registry.load("judge.tolerances", tolerance["name"]).Settings(**tolerance)
    return compare(left, right, judged_by, portrait=portrait)


def concluded(verdict: Verdict) -> dict[str, Any]:
    """Return what a verdict comes to as plain values."""
    sites = {str(row.site): row for row in verdict.rows}
    first = verdict.where if verdict.outcome is Outcome.FAIL else ""
    return {
        "outcome": verdict.outcome.value,
        "total": verdict.total,
        "counts": verdict.counts,
        "first_failure": first if not first or first in sites else "a weight",
        "whole_model": f"whole model: {words.whole_model(verdict)}",
        "guilty": _guilty(verdict.guilty) if verdict.guilty else None,
        "causes": [(cause.id, cause.confidence) for cause in verdict.causes],
        "weights": _findings(verdict.weights),
        "doubts": [doubt_text(each, verdict.coverage) for each in verdict.coverage.doubts],
        "warnings": warning_lines(verdict),
        "rows": {site: _row(row) for site, row in sites.items()},
    }


def _weights(candidate: Sequence[Path]) -> dict[str, Any]:
    sources = [RunSource(from_folder(folder)) for folder in candidate]
    prints = {stage: held for source in sources for stage, held in source.effective.items()}
    used = {stage: held for source in sources for stage, held in source.used.items()}
    found = diff_side(prints, {}, used, "candidate", Blocks.of("minimax_m2", {}))
    check = WeightCheck(prints, tuple(found))
    return {
        "outcome": check.verdict,
        "weights": _findings(found),
        "silent": check.silent,
        "rows": {},
    }


def _findings(found: Sequence[WeightFinding]) -> list[list[str]]:
    return [[each.name, each.stage, each.what] for each in found]


def _guilty(guilt: Guilt) -> dict[str, Any]:
    return {
        "place": str(guilt.place),
        "layer": guilt.layer,
        "component": guilt.component,
        "part": guilt.detail,
        "site": str(guilt.site or ""),
        "also": list(guilt.also),
    }


def _row(row: Row) -> dict[str, Any]:
    """Return a row; its reason is words, which are kept and not compared."""
    return {
        "kind": row.kind.value,
        "outcome": row.outcome.value,
        "broken": [list(astuple(breach)) for breach in row.breaches],
        "metrics": dict(row.metrics),
        "reason": reason(row),
    }
