"""The self-test's tables: how a cell ends, what is counted, and when all of it is a pass."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from judging import shares
from judging.runs import CaseResult
from judging.shares import corpus_summary, place_table, rule_table, share_table

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.site import Kind, Place, Site
from layerparity.record.guilt import Guilt
from layerparity.record.verdict import Outcome, Row
from layerparity.selftest.cells import GridCell, Setting
from layerparity.selftest.outcomes import CellResult, Ending, effect_of, ending_of, upper_bound
from layerparity.selftest.table import (
    clean_table,
    fault_table,
    mutation_table,
    summary,
    wrong_table,
)

HERE = Setting("tiny", "one prompt", "bfloat16")
FAULTY = GridCell(HERE, "qk_norm_skipped", {}, 3, "self_attn.q_norm", "qk_norm_skipped")
CLEAN = GridCell(HERE, "8 shards", {})


@pytest.mark.parametrize(
    ("guilt", "changed", "expected"),
    [
        (Guilt(Place(3, "self_attn.q_norm")), True, Ending.NAMED),
        (Guilt(Place(3, "self_attn.k_norm")), True, Ending.NAMED),
        (Guilt(Place(3, "mlp.experts")), True, Ending.LATE),
        (Guilt(Place(3, "input_layernorm")), True, Ending.ELSEWHERE),
        (Guilt(Place(4, "self_attn.q_norm")), True, Ending.LATE),
        (Guilt(Place(2, "self_attn.q_norm")), True, Ending.ELSEWHERE),
        (Guilt(Place(None, "lm_head")), True, Ending.LATE),
        (Guilt(Place(None, "embed_tokens")), True, Ending.ELSEWHERE),
        (None, True, Ending.MISSED),
        (None, False, Ending.SAME),
    ],
)
def test_a_faulty_cell_ends(guilt: Guilt | None, changed: bool, expected: Ending) -> None:
    assert ending_of(FAULTY, guilt, changed, SERIAL) is expected


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Place(None, "norm"), Ending.NAMED),
        (Place(None, "lm_head"), Ending.LATE),
        (Place(5, "mlp"), Ending.ELSEWHERE),
        (Place(None, "embed_tokens"), Ending.ELSEWHERE),
    ],
)
def test_a_cell_outside_the_blocks_ends(place: Place, expected: Ending) -> None:
    cell = GridCell(HERE, "a wrong norm", {}, None, "norm")
    assert not cell.clean
    assert ending_of(cell, Guilt(place), True, SERIAL) is expected


def test_a_clean_cell_ends() -> None:
    assert ending_of(CLEAN, Guilt(Place(0, "mlp")), True, SERIAL) is Ending.FALSE_ALARM
    assert ending_of(CLEAN, None, True, SERIAL) is Ending.SILENT
    assert ending_of(CLEAN, None, False, SERIAL) is Ending.SAME


def test_the_bound_on_a_rate_is_the_exact_one() -> None:
    # The rule of three: none of 60 leaves 1 - 0.05 ** (1 / 60).
    assert upper_bound(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60), rel=1e-9)
    assert upper_bound(0, 0) == 1.0
    assert upper_bound(60, 60) == pytest.approx(1.0)
    assert upper_bound(1, 60) > upper_bound(0, 60)


def test_a_variant_counts_once_and_only_if_it_differs() -> None:
    ended = [
        CellResult(CLEAN, Ending.SILENT, phase="prefill"),
        CellResult(CLEAN, Ending.FALSE_ALARM, "layers.0.mlp", phase="decode"),
        CellResult(GridCell(HERE, "same", {}), Ending.SAME),
        CellResult(FAULTY, Ending.NAMED, "layers.3.self_attn.q_norm", "qk_norm_skipped"),
    ]
    found = summary(ended)
    assert found.counts["clean variants"] == 1
    assert found.counts["false alarms"] == 1
    assert found.verdict == "fail"
    assert [row[0] for row in wrong_table(ended)[2]] == ["8 shards"]
    assert fault_table(ended)[2][0][2] == "1"


def test_an_alarm_in_either_phase_is_one() -> None:
    prefill = CellResult(CLEAN, Ending.FALSE_ALARM, "layers.0.mlp", phase="prefill")
    silent = CellResult(CLEAN, Ending.SILENT, phase="decode")
    for phases in itertools.permutations([prefill, silent]):
        found = summary(phases)
        assert (found.counts["clean variants"], found.counts["false alarms"]) == (1, 1)
        assert found.verdict == "fail"


def test_clean_variants_are_counted_by_what_they_are() -> None:
    chain = replace(HERE, inputs="256 tokens", chained=True)
    ended = [
        CellResult(CLEAN, Ending.SILENT, phase="prefill"),
        CellResult(CLEAN, Ending.SAME, phase="decode"),
        CellResult(GridCell(chain, "8 shards", {}), Ending.FALSE_ALARM, "layers.0.mlp"),
        CellResult(GridCell(chain, "shuffled", {}), Ending.SAME),
        CellResult(FAULTY, Ending.MISSED),
    ]
    assert clean_table(ended)[2] == [
        ("8 shards", "2", "2", "1"),
        ("shuffled", "1", "0", "0"),
        ("tiny", "3", "2", "1"),
        ("one prompt", "1", "1", "0"),
        ("256 tokens, chained", "2", "1", "1"),
        ("bfloat16", "3", "2", "1"),
    ]


def test_a_missed_fault_fails_the_self_test() -> None:
    assert summary([CellResult(FAULTY, Ending.MISSED)]).verdict == "fail"
    assert summary([CellResult(FAULTY, Ending.NAMED)]).verdict == "pass"
    seen, hidden = (CellResult(FAULTY, Ending.MISSED, effect=each) for each in (2.0, 1.9))
    assert summary([seen]).verdict == "fail"
    assert fault_table([seen, hidden])[2][0][5:] == ("1", "0 of 0", "1", "0")
    assert [row[3] for row in wrong_table([seen, hidden])[2]] == ["missed"]
    assert summary([hidden]).verdict == "pass"


def test_what_no_rounding_does_is_never_below_the_noise() -> None:
    for metrics, effect in (
        ({"error_ratio": 0.5}, 0.5),
        ({"error_ratio": 0.5, "flips_outside_noise": 1}, 2.0),
        ({"unequal": 3}, 2.0),
        ({}, 0.0),
    ):
        assert (
            effect_of(Row(Site("norm", "out"), Kind.REAL, Outcome.PASS, metrics=metrics)) == effect
        )


def test_unforeseen_faults_are_counted_by_effect() -> None:
    drawn = GridCell(HERE, "q_proj x 1.01", {}, 0, "self_attn.q_proj", drawn=True)
    ended = [
        CellResult(drawn, Ending.MISSED, effect=1.5),
        CellResult(drawn, Ending.NAMED, effect=1.5),
        CellResult(drawn, Ending.SAME),
        CellResult(drawn, Ending.NAMED, effect=1e6, by_sites=True),
    ]
    rows = mutation_table(ended)[2]
    assert rows == [
        ("1 to 2", "2", "50%", "0%", "50%"),
        ("64 and more", "1", "100%", "100%", "100%"),
    ]
    assert summary(ended).verdict == "pass"


# ---------------------------------------------------------------- the corpus


def result(name: str = "a", **known: object) -> CaseResult:
    plain = CaseResult(
        name=name,
        family="llama",
        dtype="float32",
        kind="slips",
        foreseen=True,
        told=True,
        place="layers.1.mlp",
        true=("scale",),
        ending=Ending.NAMED,
        named="layers.1.mlp",
        effect=8.0,
        causes=(("scale", 0.9), ("offset", 0.4)),
    )
    return replace(plain, **known)


def test_what_was_said_is_held_against_what_is_true() -> None:
    false = result("b", true=(), foreseen=False, causes=(("scale", 0.95),))
    equal = result("c", ending=Ending.SAME, causes=(("offset", 1.0),))
    bins = {row[0]: row[1:] for row in share_table([result(), false, equal])[2]}
    assert bins["90% to 100%"] == ("2", "1", "50%", "2", "1", "1", "0")
    assert bins["40% to 50%"] == ("1", "0", "0%", "0", "0", "0", "0")
    assert bins["70% and more"][:3] == ("2", "1", "50%")
    rules = {row[0]: row[1:] for row in rule_table([result(), false])[2]}
    assert rules["scale"] == ("2", "1", "2", "1", "1")
    assert rules["offset"] == ("1", "0", "0", "0", "0")
    assert [row[0] for row in shares.wrong_table([result(), false])[2]] == ["b"]


def test_places_are_counted_by_effect() -> None:
    late = result("b", ending=Ending.LATE, named="layers.1.mlp.experts")
    missed = result("c", ending=Ending.MISSED, named="", effect=1.0)
    rows = {row[0]: row[1:] for row in place_table([result(), late, missed])[2]}
    assert rows["effect below twice the floor"] == ("1", "0.0%", "0.0%", "0.0%")
    assert rows["effect twice the floor and more"] == ("2", "100.0%", "100.0%", "50.0%")
    assert corpus_summary([result(), late]).verdict == "fail"
    assert corpus_summary([result()]).verdict == "pass"
    assert corpus_summary([result(true=())]).verdict == "fail"
