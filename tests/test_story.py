"""One story: no two sentences of a verdict contradict each other, wherever they are said.

A verdict is said on the terminal, as Markdown, as a page and by job=bisect. Here every one of these
is read again and held against the rows and weights, over stored comparisons and over cases that
once contradicted themselves: wrong weights beside a wrong core, tokens that differ, sites that were
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bisections import ORDER, after, block, compared, concluded, row, site, weight
from masters.adapter import verdict_of
from report_samples import CASES
from stories import Story, contradictions
from test_masters import GIVEN, MASTERS, RUNS, read

from layerparity.anatomy.site import Kind, Site
from layerparity.ground import registry
from layerparity.judge.again import judge_again
from layerparity.judge.coverage import whole_model
from layerparity.judge.decide import outcome_of
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.stored_run import from_folder
from layerparity.record.verdict import Outcome, Row, Verdict


# ---------------------------------------------------------------- cases that once contradicted
def judged(rows: Sequence[Row], weights: Sequence[Any] = (), feed: str = "isolated") -> Verdict:
    """Return a verdict on rows and weights as `conclude` makes it of them."""
    verdict = concluded(compared(list(rows), feed=feed, weights=weights))
    return replace(verdict, whole=whole_model(rows, 6, verdict.outcome))


def unseen(where: Site, kind: Kind = Kind.REAL) -> Row:
    return Row(where, kind, Outcome.SKIPPED, why=Reason(ReasonKind.SKIPPED, {"text": "not seen"}))


def outside(name: str, outcome: Outcome = Outcome.PASS) -> Row:
    return Row(Site.parse(name), Kind.EXACT, outcome, metrics={"unequal": float(outcome == "fail")})


_NAME = "model.layers.1.self_attn.q_proj.weight"
SLIP = replace(weight(_NAME, 1, "self_attn.q_proj", "changed_value"), tensor="weight")
CORE = after("self_attn:context")
RIGHT = [row for layer in range(6) for row in block(layer)]


def blocks(wrong: Mapping[int, Sequence[str]]) -> list[Row]:
    return [each for layer in range(6) for each in block(layer, wrong.get(layer, ()))]


EMBEDDED = outside("embed_tokens:out", Outcome.FAIL)
CONSTRUCTED = {
    "a weight in block 1 and a core in block 4": judged(blocks({4: CORE}), [SLIP]),
    "the same, chained": judged(blocks({4: CORE, 5: ORDER}), [SLIP], "chained"),
    "a weight that nothing shows": judged(RIGHT, [SLIP]),
    "two cores": judged(blocks({1: CORE, 4: CORE})),
    "every block": judged(blocks(dict.fromkeys(range(6), CORE))),
    "a weight in what is fed wrong": judged(blocks({0: CORE, 1: ORDER}), [SLIP], "chained"),
    "a weight that only decoding shows": judged(
        [
            *RIGHT,
            *(
                r
                for n in range(6)
                for r in block(n, CORE if n == 1 else (), phase="decode", step=1)
            ),
        ],
        [SLIP],
    ),
    "the prefill in block 4, decoding in block 1": judged(
        [
            *blocks({4: CORE}),
            *(
                r
                for n in range(6)
                for r in block(n, CORE if n == 1 else (), phase="decode", step=1)
            ),
        ]
    ),
    "a skipped embedding": judged(
        [unseen(Site.parse("embed_tokens:in"), Kind.EXACT), EMBEDDED, *RIGHT]
    ),
    "an embedding that nobody saw": judged([EMBEDDED, *RIGHT], feed="chained"),
    "tokens that differ": judged(
        [outside("embed_tokens:in", Outcome.FAIL), EMBEDDED, *blocks({0: [":in", *CORE]})],
        feed="chained",
    ),
    "inputs that differ": judged(blocks({2: [":in"]})),
}


@pytest.mark.parametrize("name", [*CONSTRUCTED, *CASES])
def test_no_two_sentences_contradict(name: str) -> None:
    verdict = CONSTRUCTED[name] if name in CONSTRUCTED else CASES[name]
    assert list(contradictions(Story(verdict))) == []


JUDGED_AGAIN = (
    "bf16-absorbed",
    "bf16-gate_up_swapped",
    "bf16-one_row_slips",
    "chain-right",
    "fixed-bf16-right",
    "spoken-right",
)


@pytest.mark.parametrize("name", JUDGED_AGAIN)
def test_no_two_sentences_contradict_of_what_is_judged_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MASTERS)
    case = read(MASTERS / "expected" / f"{name}.json")
    golden, candidate, tolerance = (case[key] for key in GIVEN)
    sides = [[RUNS / each for each in side] for side in (golden, candidate)]
    verdict = verdict_of(*sides, tolerance, portrait=True)
    assert list(contradictions(Story(verdict))) == []
    other = "fixed" if tolerance["name"] == "calibrated" else "calibrated"
    by = registry.load("judge.tolerances", other).Settings()
    again = judge_again(verdict, by, [from_folder(folder) for folder in sides[0]])
    assert list(contradictions(Story(again))) == []


def test_two_findings_are_listed_and_the_first_in_the_data_is_the_place() -> None:
    verdict = CONSTRUCTED["a weight in block 1 and a core in block 4"]
    assert [str(each) for each in Story(verdict).places] == [
        "layers.1.self_attn.q_proj",
        "layers.4.self_attn (attention core)",
    ]
    story = Story(verdict)
    assert story.console.startswith("FAIL at layers.1.self_attn.q_proj: ")
    assert story.console.splitlines()[0].rstrip().endswith(", and 1 more place")
    assert "also      layers.4.self_attn (attention core) goes wrong by itself: " in story.console
    assert "no site of layers.1 fails" in story.console
    assert re.search(r"│ layer 1 +│ fail +│ layers.1.self_attn.q_proj \(weights\)", story.console)
    assert "whole model: fail" in story.console


def test_what_comes_after_the_first_failure_of_a_chain_is_no_finding_but_its_weights_are() -> None:
    later = weight("model.layers.5.mlp", 5, "mlp", "never_loaded")
    verdict = judged(blocks({1: CORE, 2: ORDER, 5: CORE}), [later], "chained")
    assert [each.place.layer for each in Story(verdict).places] == [1, 5]
    assert "sites of layers.5" not in Story(verdict).console, "it is not the first place"


@pytest.mark.parametrize("name", ["a skipped embedding", "an embedding that nobody saw"])
def test_what_was_not_observed_never_passes(name: str) -> None:
    story = Story(CONSTRUCTED[name])
    assert "embed_tokens:in was not judged: the fault may lie before it" in story.console
    assert "embed_tokens:in passes" not in story.console


def test_tokens_that_differ_are_no_fault_of_the_embedding() -> None:
    story = Story(CONSTRUCTED["tokens that differ"])
    assert story.verdict.guilty is None
    assert "No place goes wrong by itself: embed_tokens:in differs, and it is what" in story.console


# ---------------------------------------------------------------- the test can fail
PLANTED = {
    "a whole model that passes": lambda v: replace(v, whole=replace(v.whole, outcome=Outcome.PASS)),
    "an outcome of its own": lambda v: replace(v, outcome=Outcome.PASS),
    "no place": lambda v: replace(v, guilty=None, further=()),
    "another first place": lambda v: replace(v, guilty=v.further[0], further=(v.guilty,)),
    "a place left out": lambda v: replace(v, further=()),
    "a good input that was skipped": lambda v: replace(
        v, guilty=replace(v.guilty, good=(site(9, ":in"),))
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_contradiction_is_seen(what: str) -> None:
    sound = CONSTRUCTED["a weight in block 1 and a core in block 4"]
    assert list(contradictions(Story(sound))) == []
    assert list(contradictions(Story(PLANTED[what](sound)))) != []


def test_an_outcome_follows_from_rows_and_weights() -> None:
    assert outcome_of(RIGHT, [SLIP], ()) is Outcome.FAIL
    assert judged(RIGHT, [SLIP]).whole.outcome is Outcome.FAIL
    assert row(site(0, ":in")).outcome is Outcome.PASS
