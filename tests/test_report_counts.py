"""What a report counts of a verdict, and which of its numbers it shows as the worst."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from report_samples import judged, real

from layerparity.anatomy.site import Kind, Site
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report import keep, series
from layerparity.report.at_the_end import end_lines, end_metrics, end_table
from layerparity.report.gauge import Gauge, nearest_to_limit
from layerparity.report.headline import asked_counts, counts_text, left_out_lines
from layerparity.report.junit import render_junit
from layerparity.report.measures import BY_NAME

UNASKED = Reason(ReasonKind.NOT_ASKED_FOR, {"capture": "blocks"})
NO_STEP = {"phase": "decode", "step": 1}


def left_out(site: str, why: Reason, outcome: Outcome = Outcome.SKIPPED) -> Row:
    return Row(Site.parse(site), Kind.REAL, outcome, why=why)


def test_sites_that_nobody_asked_for_are_not_counted() -> None:
    verdict = judged(
        [
            real("layers.0:out", 0.0),
            left_out("layers.0.mlp:out", UNASKED),
            left_out("layers.0.self_attn:out", UNASKED),
            left_out(
                "layers.0:out@decode.1",
                Reason(ReasonKind.NO_STEP, {"side": "candidate", **NO_STEP}),
            ),
            left_out(
                "layers.1:out@decode.1", Reason(ReasonKind.NO_STEP, {"side": "golden", **NO_STEP})
            ),
            left_out("layers.1:in", Reason(ReasonKind.SKIPPED, {"text": "fused"})),
            left_out("layers.1:out", Reason(ReasonKind.LOST), Outcome.MISSING),
        ]
    )
    counts = {name: count for name, count in asked_counts(verdict).items() if count}
    assert counts == {"pass": 1, "missing": 1, "skipped": 2}
    assert counts_text(verdict) == "1 pass + 1 missing + 2 skipped = 4 sites asked for"
    assert left_out_lines(verdict) == [
        "skipped: 1 the golden ran no decode step",
        "skipped: 1 fused",
        "not asked for: 2 not captured by the candidate (capture=blocks)",
        "not asked for: 1 the candidate ran no decode step",
    ]


@pytest.mark.parametrize(
    ("outcomes", "tag"),
    [
        ((Outcome.PASS, Outcome.SKIPPED), None),
        ((Outcome.PASS, Outcome.FAIL), "failure"),
        ((Outcome.INCONCLUSIVE, Outcome.SKIPPED), "skipped"),
        ((Outcome.MISSING, Outcome.MISSING), "skipped"),
        ((Outcome.SKIPPED, Outcome.SKIPPED), "skipped"),
    ],
)
def test_a_stage_of_which_nothing_is_decided_is_not_green(
    outcomes: tuple[Outcome, Outcome], tag: str | None
) -> None:
    names = ("layers.0.mlp:out", "layers.0:out")
    rows = [real(name, 0.1, each, "open") for name, each in zip(names, outcomes, strict=True)]
    suite = ElementTree.fromstring(render_junit(judged([real("norm:out", 0.0), *rows])))
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {"norm", "layers.0"}
    assert [each.tag for each in cases["layers.0"]] == ([tag] if tag else [])
    assert (suite.get("failures"), suite.get("skipped")) == (
        str(int(tag == "failure")),
        str(int(tag == "skipped")),
    )


def test_nan_takes_all_of_its_limit() -> None:
    r = BY_NAME["error_ratio"]
    assert [Gauge(r, value, 2.0).share for value in (0.0, 1.0, 2.0)] == [0.0, 0.5, 1.0]
    assert Gauge(r, math.nan, 2.0).share == math.inf
    assert Gauge(BY_NAME["pearson"], 0.995, 0.99).share == pytest.approx(0.5)
    assert Gauge(BY_NAME["unequal"], 3.0, 0.0).share == math.inf
    rows = [
        Row(Site.parse(f"layers.{n}:out"), Kind.REAL, Outcome.FAIL, metrics={"error_ratio": value})
        for n, value in enumerate((1.0, math.nan, 9.0))
    ]
    assert nearest_to_limit(rows, {"error_ratio": 2.0}) is rows[1]


def by_r(*values: float) -> Verdict:
    """Return a verdict by R on the outputs of some blocks."""
    rows = [
        Row(Site.parse(f"layers.{n}:out"), Kind.REAL, Outcome.FAIL, metrics={"error_ratio": value})
        for n, value in enumerate(values)
    ]
    return replace(judged(rows), tolerance="calibrated", limits={"error_ratio": 2.0})


def test_a_candidate_of_nan_is_the_worst_of_its_series() -> None:
    assert keep._worst(by_r(0.5, 1.5)) == {
        "worst": "R 1.5 of 2",
        series.WORST: "1.5",
        series.LIMIT: "2.0",
    }
    assert keep._worst(by_r(0.5, math.nan))[series.WORST] == "inf"
    told = {name: value for name, value, _ in keep._metrics(by_r(0.5, math.nan))}
    assert told["R/worst"] == math.inf


def test_the_worst_decode_step_is_that_of_least_agreement_and_largest_divergence() -> None:
    ends = {"lm_head:out": (0.9, 0.5), "lm_head:out@decode.1": (1.0, 0.01)}
    ends |= {"lm_head:out@decode.2": (0.25, 0.03)}
    rows = [
        Row(Site.parse(name), Kind.REAL, Outcome.PASS, metrics={"top1_agreement": a, "kl_mean": k})
        for name, (a, k) in ends.items()
    ]
    verdict = judged(rows)
    prefill, steps = end_lines(verdict)
    assert (
        "lm_head alone, fed the same on both sides, in the prefill" in prefill and "90 %" in prefill
    )
    assert "worst of 2 decode steps" in steps and "25 %" in steps and "0.03" in steps
    _, lines = end_table(verdict, every=False)
    assert [line[0] for line in lines] == ["prefill", "worst of 2 decode steps"]
    assert "25 %" in lines[1]
    points = [(name, step) for name, _, step in end_metrics(verdict) if "top1" in name]
    assert points == [("logits/top1_agreement", step) for step in range(3)]
    chained = replace(verdict, candidate=replace(verdict.candidate, feeds=("chained",)))
    assert end_lines(chained)[0].startswith("logits of the prefill: ")
    elsewhere = Row(Site.parse("layers.3:out"), Kind.REAL, Outcome.FAIL)
    wrong = judged([*rows, elsewhere])
    assert end_lines(wrong) == [], "a head by itself knows nothing of block 3"
    its = judged([replace(each, outcome=Outcome.FAIL) for each in rows])
    assert len(end_lines(its)) == 2
