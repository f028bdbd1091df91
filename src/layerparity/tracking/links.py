"""Addresses inside the MLflow UI (its routes live behind ``#``)."""

from __future__ import annotations

from urllib.parse import quote

# Without it the UI opens its pages for chat traces, where our runs are called evaluations.
_VIEW = "workflowType=machine_learning"


def run_url(base: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """Return a run's page, or a tab of it such as ``model-metrics`` or ``artifacts/x.html``."""
    page = f"{base}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{page}/{quote(tab)}?{_VIEW}" if tab else f"{page}?{_VIEW}"
