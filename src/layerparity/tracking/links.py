"""Addresses inside the MLflow UI (its routes live behind ``#``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

# Without it the UI opens its pages for chat traces, where our runs are called evaluations.
_VIEW = "workflowType=machine_learning"


def run_url(base: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """Return a run's page, or a tab of it such as ``model-metrics`` or ``artifacts/x.html``."""
    page = f"{base}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{page}/{quote(tab)}?{_VIEW}" if tab else f"{page}?{_VIEW}"


def compare_url(base: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """Return the page that lays runs side by side."""
    runs, experiments = json.dumps(list(run_ids)), json.dumps([experiment_id])
    return f"{base}/#/compare-runs?runs={quote(runs)}&experiments={quote(experiments)}&{_VIEW}"
