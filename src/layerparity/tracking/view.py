"""The view in which the MLflow UI lists runs: its columns, kept as MLflow keeps a shared view.

A shared view is a tag of the experiment, ``mlflow.sharedViewState.KEY``, that holds the state of
the page as JSON; an address with ``viewStateShareKey=KEY`` opens it. So MLflow 3.17 does.
"""

from __future__ import annotations

import json

from layerparity.tracking.names import PREFIX

_KEY = "layerparity"
# The columns with their widths in pixels; what is not chosen here stands there anyhow.
_CHOSEN = {
    f"tags.`{PREFIX}kind`": 105,
    f"tags.`{PREFIX}verdict`": 85,
    f"tags.`{PREFIX}first_failure`": 200,
    "metrics.`R/worst`": 90,
    f"tags.`{PREFIX}model`": 150,
    f"tags.`{PREFIX}port`": 90,
    f"tags.`{PREFIX}dtype`": 90,
    f"tags.`{PREFIX}device`": 130,
    "attributes.`Dataset`": 150,
}
_FIRST = {"attributes.`Run Name`": 330, "runDateAndNestInfo": 140}
_LAST = {"duration": 90}
# Without it the UI opens its pages for chat traces, where our runs are called evaluations.
WORKFLOW = "workflowType=machine_learning"


def shared_view() -> dict[str, str]:
    """Return the tag of an experiment that keeps the view."""
    widths = {**_FIRST, **_CHOSEN, **_LAST}
    state = {
        "selectedColumns": list(_CHOSEN),
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    return {f"mlflow.sharedViewState.{_KEY}": json.dumps(state)}


def runs_url(base: str, experiment_id: str) -> str:
    """Return the page that lists an experiment's runs, in the view."""
    page = f"{base}/#/experiments/{experiment_id}/runs"
    return f"{page}?viewStateShareKey={_KEY}&{WORKFLOW}"
