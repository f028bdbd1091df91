"""Comparisons made by hand for tests of what reads them: a block with some of its sites wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from report_samples import side

from layerparity.anatomy.dataflow import ORDER
from layerparity.anatomy.site import Kind, Site
from layerparity.mistakes.cause import Evidence
from layerparity.record.comparison import Comparison
from layerparity.record.verdict import Outcome, Row, sum_up

DEFAULT = (":in", "self_attn:out", "mlp.gate:logits", "mlp.gate:choices", "mlp:out", ":out")


@dataclass(frozen=True)
class WeightFinding:
    """A finding as the comparison of weights makes it."""

    name: str
    stage: str
    layer: int | None
    component: str
    what: str
    text: str = "it differs"


def site(layer: int, local: str, phase: str = "prefill", step: int = 0) -> Site:
    path, _, end = local.partition(":")
    return Site(f"layers.{layer}.{path}" if path else f"layers.{layer}", end, phase, step)


def row(where: Site, outcome: Outcome = Outcome.PASS, **metrics: float) -> Row:
    exact = where.end == "in" and where.component == ""
    return Row(where, Kind.EXACT if exact else Kind.REAL, outcome, "", dict(metrics))


def block(
    layer: int,
    wrong: Sequence[str] = (),
    sites: Sequence[str] = ORDER,
    phase: str = "prefill",
    step: int = 0,
    outcome: Outcome = Outcome.FAIL,
) -> list[Row]:
    """Return a block's rows; ``wrong`` sites, by address in the block, end with ``outcome``."""
    return [
        row(site(layer, local, phase, step), outcome if local in wrong else Outcome.PASS)
        for local in sites
    ]


def after(local: str) -> list[str]:
    """Return a site of the block and all that come after it in a forward pass."""
    return ORDER[ORDER.index(local) :]


def compared(
    rows: list[Row],
    feed: str = "isolated",
    weights: Sequence[WeightFinding] = (),
    token_errors: Mapping[str, list[float]] | None = None,
    dtype: str = "float32",
) -> Comparison:
    made = Comparison(
        golden=side("golden", dtype=dtype),
        candidate=side("candidate", feed=feed, dtype=dtype),
        tolerance="calibrated",
        limits={},
        rows=rows,
        verdict=sum_up(rows, len(rows), "whole model: fail, 2 of 6 blocks compared"),
        token_errors=dict(token_errors or {}),
    )
    made.weights = list(weights)  # type: ignore[attr-defined, unused-ignore]
    return made


def evidence(
    component: str,
    local: str,
    metrics: Mapping[str, float] | None = None,
    failed: Mapping[str, Mapping[str, float]] | None = None,
    passed: Sequence[str] = (),
    **more: Any,
) -> Evidence:
    """Return evidence of a component whose site ``local`` fails with some metrics."""
    where = site(3, local, more.pop("phase", "prefill"), more.pop("step", 0))
    failing = {local: dict(metrics or {}), **(failed or {})}
    rows = {name: row(site(3, name), Outcome.FAIL, **found) for name, found in failing.items()}
    rows |= {name: row(site(3, name)) for name in passed}
    errors = more.pop("errors", None)
    tokens = {local: errors} if errors is not None else {}
    return Evidence(component, site=where, layer=3, rows=rows, token_errors=tokens, **more)
