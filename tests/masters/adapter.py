"""Adapter: the one place that knows where today's code keeps what a comparison concludes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from masters.reasons import broken_limits

from layerparity.ground import registry
from layerparity.judge.descend import first_guilty
from layerparity.judge.evidence import evidence_of
from layerparity.judge.guilt import Guilt
from layerparity.judge.parity import compare_runs
from layerparity.judge.weights_diff import diff_side
from layerparity.mistakes.catalogue import likeliest
from layerparity.record.comparison import Comparison
from layerparity.record.findings import WeightCheck, WeightFinding
from layerparity.record.source import RunSource
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Row
from layerparity.report.answering import _of_golden
from layerparity.settings.config import Config


def conclude(
    golden: Sequence[Path], candidate: Sequence[Path], tolerance: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare stored folders, oldest first; return what is concluded as plain values.

    ``tolerance`` holds a tolerance's name and the limits that differ from its own. Without a golden
    the candidate's weights are held against the checkpoint, as ``what=weights`` does.
    """
    if not golden:
        return _weights(candidate)
    left, right = ([from_folder(folder) for folder in side] for side in (golden, candidate))
    judged_by = registry.load("judge.tolerances", tolerance["name"]).Settings(**tolerance)
    comparison = compare_runs(left, right, judged_by)
    return _concluded(comparison, left)


def _concluded(comparison: Comparison, golden: Sequence[StoredRun]) -> dict[str, Any]:
    guilt = first_guilty(comparison)
    verdict, sites = comparison.verdict, {str(row.site): row for row in comparison.rows}
    first = verdict.first_failure
    return {
        "outcome": verdict.outcome.value,
        "total": verdict.total,
        "counts": verdict.counts,
        "first_failure": first if not first or first in sites else "a weight",
        "whole_model": verdict.whole_model,
        "guilty": _guilty(guilt) if guilt else None,
        "causes": _causes(guilt, comparison, golden) if guilt else [],
        "weights": _findings(comparison.weights),
        "doubts": list(comparison.coverage.doubts),
        "warnings": comparison.warnings,
        "rows": {site: _row(row, comparison) for site, row in sites.items()},
    }


def _weights(candidate: Sequence[Path]) -> dict[str, Any]:
    sources = [RunSource(from_folder(folder)) for folder in candidate]
    prints = {stage: held for source in sources for stage, held in source.effective.items()}
    used = {stage: held for source in sources for stage, held in source.used.items()}
    found = diff_side(prints, {}, used, "candidate")
    check = WeightCheck(prints, tuple(found))
    return {
        "outcome": check.verdict,
        "weights": _findings(found),
        "silent": check.silent,
        "rows": {},
    }


def _findings(found: Sequence[WeightFinding]) -> list[list[str]]:
    return [[each.name, each.stage, each.what] for each in found]


def _causes(
    guilt: Guilt, comparison: Comparison, golden: Sequence[StoredRun]
) -> list[tuple[str, float]]:
    seen = evidence_of(guilt, comparison, _of_golden(Config(), golden), golden)
    return [(cause.id, cause.confidence) for cause in likeliest(seen)]


def _guilty(guilt: Guilt) -> dict[str, Any]:
    """Return a guilty place; its notes are words, which are kept and not compared."""
    names = ("place", "layer", "component", "part", "site", "also", "notes")
    return {name: guilt.to_dict()[name] for name in names}


def _row(row: Row, comparison: Comparison) -> dict[str, Any]:
    """Return a row; its reason is words, which are kept and not compared."""
    return {
        "kind": row.kind.value,
        "outcome": row.outcome.value,
        "broken": broken_limits(row.reason, row.metrics, comparison.limits),
        "metrics": dict(row.metrics),
        "reason": row.reason,
    }
