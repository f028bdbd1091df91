"""Verdicts made by hand for tests of what reads them: a block with some of its sites wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from report_samples import BLOCKS, side

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Place, Site
from layerparity.judge.conclude import with_places
from layerparity.judge.decide import outcome_of
from layerparity.judge.guilty import first_guilty, guilty_in, judged_of
from layerparity.mistakes.cause import Evidence
from layerparity.record.guilt import Guilt
from layerparity.record.verdict import Outcome, Row, Verdict, WholeModel
from layerparity.record.weights import Fate, WeightFinding
from layerparity.report.answer import answer_of

DEFAULT = (":in", "self_attn:out", "mlp.gate:logits", "mlp.gate:choices", "mlp:out", ":out")
ORDER = list(SERIAL.order)


def weight(name: str, layer: int, component: str, what: str) -> WeightFinding:
    return WeightFinding(name, f"layers.{layer}", layer, component, what, Fate.NOT_GOLDEN)


def evidence_lines(verdict: Verdict, guilt: Guilt) -> str:
    """Return what a report says for a guilt, a line for each observation."""
    answer = answer_of(replace(verdict, guilty=guilt), commands=())
    assert answer is not None
    return "\n".join(answer.evidence)


def first(verdict: Verdict) -> Guilt | None:
    return first_guilty(judged_of(verdict))


def concluded(verdict: Verdict) -> Verdict:
    """Return a verdict that names its first wrong place, as a comparison's does."""
    return with_places(verdict)


def descend(verdict: Verdict, layer: int) -> Guilt | None:
    return guilty_in(judged_of(verdict), Place(layer))


def site(layer: int, local: str, phase: str = "prefill", step: int = 0) -> Site:
    path, _, end = local.partition(":")
    return Site(f"layers.{layer}.{path}" if path else f"layers.{layer}", end, phase, step)


def row(where: Site, outcome: Outcome = Outcome.PASS, **metrics: float) -> Row:
    exact = where.end == "in" and where.component == ""
    return Row(where, Kind.EXACT if exact else Kind.REAL, outcome, metrics=dict(metrics))


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
    blocks: Blocks = BLOCKS,
) -> Verdict:
    return Verdict(
        golden=side("golden", dtypes=(dtype,)),
        candidate=side("candidate", feeds=(feed,), dtypes=(dtype,)),
        tolerance="calibrated",
        knows_chains=True,
        limits={},
        rows=tuple(rows),
        total=len(rows),
        outcome=outcome_of(rows, weights, ()),
        whole=WholeModel(Outcome.FAIL, 6, 2),
        weights=tuple(weights),
        token_errors=dict(token_errors or {}),
        blocks=blocks,
    )


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
