"""Verdicts that look like real ones: few layers or many, clean or with one broken component."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from report_portraits import portrait

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.judge.conclude import with_places
from layerparity.judge.decide import outcome_of
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record.guilt import Cause, Guilt
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.side import RunOrigin, Side
from layerparity.record.verdict import Breach, Outcome, Row, Verdict, WholeModel
from layerparity.report.answer import answer_of
from layerparity.report.html import render_html
from layerparity.report.markdown import render_markdown

BLOCKS = Blocks(usual=SERIAL)

LOCALS = (
    ":in",
    "self_attn:out",
    "mlp.gate:logits",
    "mlp.gate:choices",
    "mlp.gate:weights",
    "mlp:out",
    ":out",
)
COMPONENTS = ("input_layernorm:out", "self_attn.q_proj:out", "self_attn:context")
LIMITS = {
    "max_abs_diff": 0.01,
    "mean_abs_diff": 0.001,
    "similarity_percentage": 95.0,
    "cosine_distance": 0.01,
    "pearson": 0.99,
}


def real_metrics(rel_l2: float, scale: float = 1.0) -> dict[str, float]:
    """Return metrics that belong together for noise of a relative size; 0 is bit-equal."""
    snr = -20 * math.log10(rel_l2) if rel_l2 else 320.0
    return {
        "max_abs_diff": 4.2 * rel_l2 * scale,
        "mean_abs_diff": 0.8 * rel_l2 * scale,
        "median_abs_diff": 0.67 * rel_l2 * scale,
        "std_abs_diff": 0.6 * rel_l2 * scale,
        "rel_l2": rel_l2,
        "cosine_distance": rel_l2**2 / 2,
        "pearson": 1 - rel_l2**2 / 2,
        "similarity_percentage": 100.0 * math.exp(-20 * rel_l2),
        "norm_ratio": 1 + rel_l2 / 7,
        "snr_db": snr,
        "ulp_distance": float(round(rel_l2 * 2**23)),
        "nonfinite_disagreement": 0.0,
    }


def side(kind: str, **changes: Any) -> Side:
    values: dict[str, Any] = {
        "name": f"{kind}-tiny-minimax-m2",
        "backend": "gpu" if kind == "golden" else "neuron",
        "device": "cpu" if kind == "golden" else "XLA:CPU, not Neuron",
        "dtypes": ("float32",),
        "port": "hf",
        "url": f"http://127.0.0.1:5000/#/experiments/1/runs/{kind}",
        "model": "tiny_minimax_m2",
        "scope": "full",
        "feeds": ("isolated",),
    }
    values.update(changes)
    named = values.setdefault("named", f"{kind[:1] * 4}3f9a27be1d4c06a5b8c7d6e5f40312")
    settings = {"backend": values["backend"], "kind": kind, "feed": values["feeds"][0]}
    stages = ("embed_tokens", *(f"layers.{layer}" for layer in range(62)), "norm", "lm_head")
    values.setdefault("made", (RunOrigin(named, True, stages, settings),))
    return Side(**values)


def sample(
    layers: int = 6,
    broken: str = "",
    tokens: int = 64,
    extra: tuple[str, ...] = (),
    feed: str = "isolated",
    seed: int = 7,
) -> Verdict:
    """Return a verdict on ``layers`` blocks; ``broken`` is the site at which it goes wrong."""
    chance = random.Random(seed)
    names = ["embed_tokens:out"]
    for layer in range(layers):
        inside = LOCALS[:1] + extra + LOCALS[1:]
        names += [f"layers.{layer}{'' if x[0] == ':' else '.'}{x}" for x in inside]
    names += ["norm:out", "lm_head:out"]
    rows, token_errors = [], {}
    for site in BLOCKS.sorted(Site.parse(name) for name in names):
        size = _size(site, broken, feed, chance)
        rows.append(_row(site, size, bool(broken)))
        if rows[-1].kind is Kind.REAL:
            token_errors[str(site)] = _tokens(size, tokens, site, chance)
    return with_places(
        Verdict(
            golden=side("golden"),
            candidate=side("candidate", feeds=(feed,)),
            tolerance="fixed",
            limits=dict(LIMITS),
            rows=tuple(rows),
            total=len(rows),
            outcome=outcome_of(rows, (), ()),
            whole=WholeModel(Outcome.FAIL if broken else Outcome.PASS, layers, layers),
            token_errors=token_errors,
            settings={"tolerance": "fixed"},
            blocks=BLOCKS,
        )
    )


def judged(rows: list[Row], token_errors: dict[str, list[float]] | None = None) -> Verdict:
    """Return a verdict on rows made by hand."""
    outcome = outcome_of(rows, (), ())
    whole = Outcome.FAIL if outcome is Outcome.FAIL else Outcome.INCONCLUSIVE
    return with_places(
        Verdict(
            golden=side("golden"),
            candidate=side("candidate"),
            tolerance="fixed",
            limits=dict(LIMITS),
            rows=tuple(rows),
            total=len(rows),
            outcome=outcome,
            whole=WholeModel(whole, 62, 1),
            token_errors=token_errors or {},
            blocks=BLOCKS,
        )
    )


def html_of(verdict: Verdict) -> str:
    return render_html(verdict, answer_of(verdict))


def markdown_of(verdict: Verdict) -> str:
    return render_markdown(verdict, answer_of(verdict))


def real(
    site: str,
    rel_l2: float,
    outcome: Outcome = Outcome.PASS,
    why: str = "",
    breaches: tuple[Breach, ...] = (),
) -> Row:
    said = worded(why) if why else None
    return Row(Site.parse(site), Kind.REAL, outcome, breaches, said, real_metrics(rel_l2))


def worded(text: str) -> Reason:
    """Return a reason in words of one's own, as the author of a port gives it."""
    return Reason(ReasonKind.SKIPPED, {"text": text})


CALIBRATED = {"error_ratio": 2.0, "error_ratio_head": 2.5, "slope": 0.0005}


def calibrated(
    layers: int = 6, broken: str = "", feed: str = "isolated", tokens: int = 64, experts: int = 16
) -> Verdict:
    """Return a verdict by a noise floor, with its guilty place and a portrait of its site."""
    chance = random.Random(3)
    comparison = sample(layers, broken, tokens, COMPONENTS, feed)
    rows = []
    for row in comparison.rows:
        if row.kind is Kind.REAL:
            floor = 6e-7 * math.exp(chance.gauss(0, 0.1))
            found = {"error_ratio": row.metrics["rel_l2"] / floor, "golden_error_ratio": 0.9}
            row.metrics.update(found, floor_rel_l2=floor, error_ratio_head_index=3.0)
            if row.outcome is Outcome.FAIL:
                over = Breach("error_ratio", found["error_ratio"], CALIBRATED["error_ratio"])
                rows.append(replace(row, breaches=(over,)))
                continue
        rows.append(row)
    shown = Site.parse(broken or "layers.0.mlp:out")
    causes = (
        Cause(
            "qk_norm_per_head",
            "the norm is taken over each head",
            ("<it> fails & more",),
            confidence=0.93,
        ),
        Cause("qk_norm_skipped", "the norm is left out", confidence=0.3),
    )
    return replace(
        comparison,
        rows=tuple(rows),
        tolerance="calibrated",
        limits=dict(CALIBRATED),
        guilty=Guilt(shown.place, site=shown) if broken else None,
        causes=causes if broken else (),
        portrait=portrait(str(shown), layers, experts, chance),
    )


def every_oddity() -> Verdict:
    """Return NaN, infinities, rows without metrics, a gap in the layers, and a decode step."""
    nan = {"rel_l2": math.nan, "max_abs_diff": math.inf, "pearson": math.nan, "snr_db": -math.inf}
    site = Site.parse
    rows = [
        real("layers.0:in", 0.0),
        Row(
            site("layers.0.mlp:out"),
            Kind.REAL,
            Outcome.FAIL,
            (Breach("nonfinite_disagreement", 4.0),),
            metrics=real_metrics(0.1) | nan,
        ),
        Row(
            site("layers.0:out"),
            Kind.REAL,
            Outcome.FAIL,
            metrics={"rel_l2": math.inf, "novel": 3.0},
        ),
        _unjudged("layers.1:out", Outcome.MISSING, "the candidate holds no such site"),
        _unjudged("layers.2.mlp.gate:choices", Outcome.SKIPPED, "not observable"),
        real("layers.4:out", 2e-7),
        real("layers.4:out@decode.3", 4e-7),
        Row(
            site("norm:out"),
            Kind.EXACT,
            Outcome.INCONCLUSIVE,
            why=worded("why not"),
            metrics={"unequal": 2.0},
        ),
    ]
    tokens = {
        "layers.0:out": [math.nan, 0.0, math.inf, 1e-3],
        "layers.0.mlp:out": [math.nan] * 4,
        "layers.4:out": [1e-7, 0.0, 0.0, 0.0],
        "layers.4:out@decode.3": [1e-5],
    }
    return judged(rows, tokens)


def _unjudged(site: str, outcome: Outcome, why: str) -> Row:
    kind = Kind.INDEX_SET if site.endswith("choices") else Kind.REAL
    return Row(Site.parse(site), kind, outcome, why=worded(why))


def all_zero() -> Verdict:
    names = [f"layers.{layer}{end}" for layer in range(4) for end in (":in", ".mlp:out", ":out")]
    return judged([real(name, 0.0) for name in names], {name: [0.0] * 10 for name in names})


def _size(site: Site, broken: str, feed: str, chance: random.Random) -> float:
    if site.local == ":in" and feed == "isolated":
        return 0.0
    noise = 3e-7 * math.exp(chance.gauss(0, 0.35))
    if not broken:
        return noise
    guilty = Site.parse(broken)
    if site == guilty:
        return 0.31
    later = BLOCKS.order(site) > BLOCKS.order(guilty)
    same = site.layer == guilty.layer
    if feed == "chained" and later:
        return 0.06 * math.exp(chance.gauss(0, 0.2)) * (1 + 0.02 * ((site.layer or 0) + 1))
    return 0.041 if same and later else noise


def _row(site: Site, size: float, any_broken: bool) -> Row:
    if site.local == "mlp.gate:choices":
        agree = 1.0 if size < 1e-3 else 0.83
        broken = () if agree == 1.0 else (Breach("set_agreement", agree),)
        outcome = Outcome.FAIL if broken else Outcome.PASS
        return Row(site, Kind.INDEX_SET, outcome, broken, metrics={"set_agreement": agree})
    metrics = real_metrics(size, 1.0 + (site.layer or 0) / 3)
    broken = tuple(FixedTolerance().breaches(Kind.REAL, metrics))
    outcome = Outcome.FAIL if broken else Outcome.PASS
    return Row(site, Kind.REAL, outcome, broken, metrics=metrics)


def _tokens(size: float, tokens: int, site: Site, chance: random.Random) -> list[float]:
    if size > 1e-3 and site.local == "mlp:out":
        # Like a wrong rotation: the error grows with the position.
        grown = [0.02 + 1.6 * (token + 1) / tokens for token in range(tokens)]
        return [size * share * math.exp(chance.gauss(0, 0.2)) for share in grown]
    return [size * math.exp(chance.gauss(0, 0.5)) for _ in range(tokens)]


CASES = {
    "pass": sample(),
    "fail": sample(broken="layers.3.mlp:out"),
    "chained": sample(20, "layers.7.self_attn:out", feed="chained"),
    "components": sample(extra=COMPONENTS),
    "calibrated": calibrated(broken="layers.3.self_attn.q_proj:out"),
    "calibrated pass": calibrated(),
    "calibrated chained": calibrated(20, "layers.7.mlp:out", "chained", experts=256),
    "oddities": every_oddity(),
    "zeros": all_zero(),
    "empty": judged([]),
    "embedding only": judged([real("embed_tokens:out", 0.0)]),
    "one site": judged([real("layers.5:out", 3e-7, Outcome.INCONCLUSIVE, "not alone")]),
}
every_case = pytest.mark.parametrize("comparison", CASES.values(), ids=CASES.keys())
