"""Model limits: find the limits that a calibration kept for the model of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import damaged, read_json
from layerparity.settings.key import check_numbers

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.record.verdict import Verdict
    from layerparity.tracking.store import Store

KIND = "calibration"
FILE = "limits.json"
AUTO = "auto"
LOOKED_AT = 50
_CURE = "calibrate again"


def with_limits(tolerance: Any, store: Store, candidate: Sequence[StoredRun]) -> Any:
    """Return the tolerance with the limits of the candidate's model, where some were kept."""
    asked = getattr(tolerance, "calibration", None)
    if asked is None:
        return tolerance
    run = _newest(store, candidate) if asked == AUTO else store.find(asked, kind=KIND)[0]
    if run is None:
        return tolerance
    console.say(f"limits:    {run.name} {run.id[:8]}, calibrated for this model")
    limits = read_json(run.file(FILE), dict[str, float], _CURE)
    run.refuse_altered(FILE, _CURE)
    unknown = sorted(limits.keys() - tolerance.limits().keys())
    if unknown:
        raise damaged(run.file(FILE), f"there is no limit '{unknown[0]}'", _CURE)
    calibrated = replace(tolerance, **limits)
    check_numbers(calibrated, "tolerance.")
    return calibrated


def model_of(store: Store, verdict: Verdict, name: str) -> str:
    """Return the hash of the model that a comparison's candidate ran.

    ``name`` is the comparison's own. Raises UserError where the candidate is not in the store.
    """
    run = store.get(verdict.candidate.made[0].named)
    if run is None:
        raise UserError(f"The candidate of '{name}' is not in the store any more.")
    return run.tags["config_digest"]


def _newest(store: Store, candidate: Sequence[StoredRun]) -> StoredRun | None:
    """Return the newest finished calibration of the candidate's model and dtype."""
    wanted = {(run.tags.get("config_digest"), run.tags.get("dtype")) for run in candidate}
    for run in store.runs(kind=KIND, limit=LOOKED_AT):
        if run.finished and {(run.tags.get("config_digest"), run.tags.get("dtype"))} == wanted:
            return run
    return None
