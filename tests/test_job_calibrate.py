"""job=calibrate: limits come from comparisons that pass, of one model in one type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.ground.errors import Exit, UserError
from layerparity.jobs import calibrate
from layerparity.judge import again, model_limits
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.record.verdict import Outcome
from layerparity.settings.config import Config
from layerparity.tracking import opening as stores

USUAL = CalibratedTolerance().limits()


def comparison(name: str, ratio: float | None = 4.0, **changes: Any) -> Any:
    """Return what is read of a comparison whose candidate ran ``model`` in some ``dtypes``."""
    metrics = {} if ratio is None else {"error_ratio": ratio}
    usual = {"outcome": Outcome.PASS, "model": "m", "dtypes": ("bfloat16",), "guilty": None}
    whole = {**usual, **changes}
    side = SimpleNamespace(dtypes=whole["dtypes"])
    rows = [SimpleNamespace(metrics=metrics, site="layers.3:out", outcome=whole["outcome"])]
    return SimpleNamespace(name=name, id=name * 4, candidate=side, rows=rows, **whole)


class Store:
    """Comparisons by name; ``kept`` is what the calibration wrote."""

    def __init__(self, comparisons: list[Any]) -> None:
        self.runs = {each.name: each for each in comparisons}
        self.kept: list[dict[str, Any]] = []

    def find(self, name: str, kind: str) -> list[Any]:
        return [self.runs[name]]

    @contextmanager
    def start(self, name: str, kind: str, tags: Any, params: Any) -> Iterator[Any]:
        self.kept.append({"name": name, "kind": kind, **tags, **params})
        yield SimpleNamespace(
            url="",
            log_metrics=list,
            log_text=lambda text, file, tagged: self.kept[-1].update({file: json.loads(text)}),
        )


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "stored_verdict", lambda run: run)
    monkeypatch.setattr(model_limits, "model_of", lambda store, verdict, name: verdict.model)
    monkeypatch.setattr("layerparity.report.headline.where_text", lambda verdict: "layers.3:out")
    monkeypatch.setattr(calibrate, "say_served", lambda config: None)


def calibrated(monkeypatch: pytest.MonkeyPatch, *comparisons: Any, margin: float = 1.5) -> Store:
    store = Store(list(comparisons))
    monkeypatch.setattr(stores, "open_store", lambda config: store)
    job = calibrate.Settings(runs=[each.name for each in comparisons], margin=margin)
    try:
        assert calibrate.run(Config(job=job)) is Exit.OK
    finally:
        assert len(store.kept) <= 1
    return store


def test_the_largest_that_was_seen_and_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    store = calibrated(monkeypatch, comparison("a", 40.0), comparison("b", 60.0), margin=2)
    assert store.kept[0]["limits.json"] == {"error_ratio": 120.0}
    assert (store.kept[0]["config_digest"], store.kept[0]["dtype"]) == ("m", "bfloat16")
    # A few good runs do not show how far the next may be off.
    assert calibrated(monkeypatch, comparison("a", 1e-6)).kept[0]["limits.json"] == {
        "error_ratio": USUAL["error_ratio"] / 2
    }


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"outcome": Outcome.FAIL}, r"'b' \(bbbb\) fails at layers\.3:out: limits come from"),
        ({"model": "other"}, "of several models or dtypes"),
        ({"dtypes": ("float32",)}, "of several models or dtypes"),
        ({"dtypes": ("bfloat16", "float32")}, "of several models or dtypes"),
    ],
)
def test_what_would_excuse_a_mistake_is_refused(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], said: str
) -> None:
    good, other = comparison("a"), comparison("b", 1e6, **others)
    for both in ((good, other), (other, good)):
        with pytest.raises(UserError, match=said):
            calibrated(monkeypatch, *both)


def test_without_a_floor_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="their golden has no reference"):
        calibrated(monkeypatch, comparison("a", None))
    with pytest.raises(UserError, match="wants comparisons known to be good"):
        calibrated(monkeypatch)
