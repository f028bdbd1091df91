"""Search: delta debugging, the strategies on a model of blocks, and trials that end otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace

import pytest
from bisections import after, block, compared, concluded, row, site

from layerparity.anatomy.site import Place, Site
from layerparity.ground.errors import UserError
from layerparity.record.verdict import Outcome, Verdict
from layerparity.search.configurations import KeyTrials
from layerparity.search.ddmin import NoDifferenceError, minimal
from layerparity.search.strategies import SearchResult, Strategy, binary, inject, scan, smallest


@pytest.mark.parametrize("guilty", [{"a"}, {"c", "f"}, {"a", "b", "h"}, set("abcdefgh")])
def test_delta_debugging_finds_the_minimal_set_and_asks_once(guilty: set[str]) -> None:
    asked: list[frozenset[str]] = []

    def fails(keys: frozenset[str]) -> bool:
        asked.append(keys)
        return guilty <= keys

    assert set(minimal("abcdefgh", fails)) == guilty
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("count", range(1, 6))
def test_every_key_that_is_kept_is_needed(count: int) -> None:
    keys = "abcde"[:count]
    for size in range(1, count + 1):
        for guilty in map(frozenset, combinations(keys, size)):
            assert frozenset(minimal(keys, guilty.issubset)) == guilty


def test_delta_debugging_survives_a_test_that_is_not_monotone() -> None:
    # "b" hides what "a" does, unless "c" is there.
    def fails(keys: frozenset[str]) -> bool:
        return "a" in keys and ("b" not in keys or "c" in keys)

    found = minimal("abc", fails)
    assert fails(frozenset(found))
    assert all(not fails(frozenset(found) - {key}) for key in found)


def test_delta_debugging_refuses_what_does_not_part() -> None:
    with pytest.raises(NoDifferenceError, match="without any") as always:
        minimal("ab", lambda keys: True)
    with pytest.raises(NoDifferenceError, match="does not fail") as never:
        minimal("ab", lambda keys: False)
    assert (always.value.fails, never.value.fails) == (True, False)


class FakeBench:
    """A model of ``last + 1`` blocks of which some are wrong; counts what was run."""

    def __init__(self, last: int, wrong: Sequence[int], head: bool = True) -> None:
        self.first, self.last, self.wrong, self.head = 0, last, set(wrong), head
        self.ran: list[tuple[int, int] | str] = []

    def isolated(self) -> Verdict:
        self.ran.append("isolated")
        rows = [r for n in range(self.last + 1) for r in block(n, self._bad(n))]
        return concluded(compared(rows))

    def _bad(self, layer: int) -> list[str]:
        return after("mlp:out") if layer in self.wrong else []

    def chained(self, first: int, last: int) -> Verdict:
        self.ran.append((first, last))
        rows, errors, off = [], {}, 1e-4
        for n in range(first, last + 1):
            off = 0.3 if n in self.wrong else off
            rows += [row(site(n, ":out"), floor_rel_l2=1e-3)]
            errors[f"layers.{n}:out"] = [off] * 5
        return compared(rows, feed="chained", token_errors=errors)

    def ends(self) -> Verdict | None:
        outcome = Outcome.PASS if self.head else Outcome.FAIL
        ends = [row(Site("norm", "out")), row(Site("lm_head", "out"), outcome)]
        return concluded(compared(ends))


@pytest.mark.parametrize("wrong", [[0], [5], [31], [61], [5, 40]])
def test_strategies_find_the_wrong_block(wrong: list[int]) -> None:
    assert scan(FakeBench(61, wrong)).place == Place(wrong[0])
    prefixes, suffixes = FakeBench(61, wrong), FakeBench(61, wrong)
    assert binary(prefixes).place == Place(wrong[0])
    assert inject(suffixes).place == Place(wrong[-1])
    assert max(len(prefixes.ran), len(suffixes.ran)) <= 8


def test_strategies_end_clean_or_outside_the_blocks() -> None:
    for strategy in (binary, inject):
        clean: SearchResult = strategy(FakeBench(7, []))
        assert clean.place is None
        outside = strategy(FakeBench(7, [], head=False))
        assert outside.place == Place(None, "lm_head")
        assert outside.verdict is not None and outside.verdict.guilty is not None
    assert scan(FakeBench(7, [])).place is None


class BlindBench(FakeBench):
    """A bench whose chains hold nothing that was judged: they cannot tell of any block."""

    def chained(self, first: int, last: int) -> Verdict:
        rows = [row(site(n, ":out"), Outcome.MISSING) for n in range(first, last + 1)]
        return compared(rows, feed="chained")


@pytest.mark.parametrize("strategy", [binary, inject])
def test_a_chain_that_cannot_tell_leaves_a_doubt(strategy: Strategy) -> None:
    found = strategy(BlindBench(2, [1]))
    assert found.place is None
    assert found.doubt.startswith("the chained run cannot tell about layers.0 and 2 more")
    assert strategy(FakeBench(2, [])).doubt == ""


def test_one_block_is_enough_for_every_strategy() -> None:
    for strategy in (scan, binary, inject):
        assert strategy(FakeBench(0, [0])).place == Place(0)


def test_halving_asks_for_the_end_first() -> None:
    asked: list[int] = []

    def holds(k: int) -> bool:
        asked.append(k)
        return k >= 3

    assert smallest(0, 9, holds) == 3
    assert asked[0] == 9
    assert smallest(0, 9, lambda k: False) is None


def test_a_trial_that_is_not_judged_is_called_neither_wrong_nor_right() -> None:
    """Alone, ``b`` cannot be judged: with ``a`` it is wrong, and so are both."""

    def outcome(keys: Mapping[str, object]) -> Verdict:
        if keys == {"b": 1}:
            raise UserError("no floor for b")
        return compared([row(site(1, "mlp:out"), Outcome.FAIL if len(keys) == 2 else Outcome.PASS)])

    trials = KeyTrials(SimpleNamespace(trial=outcome), {}, {"a": 1, "b": 1})  # type: ignore
    assert minimal("ab", trials.fails) == ("a", "b")
    assert [(step.wrong, step.judged) for step in trials.steps] == [
        (False, True),
        (True, True),
        (False, True),
        (False, False),
    ]
    assert "1 trial was not judged, and so called neither wrong nor right" in trials.doubt
    assert "(b=1: cannot run: no floor for b)" in trials.doubt
    with pytest.raises(
        UserError, match=r"job\.good could not be judged \(cannot run: no floor for"
    ):
        KeyTrials(SimpleNamespace(trial=outcome), {"b": 1}, {"a": 1}).fails(  # type: ignore
            frozenset()
        )


def test_a_trial_that_is_inconclusive_is_not_called_right() -> None:
    open_ = compared([row(site(1, "mlp:out"), Outcome.INCONCLUSIVE)])
    trials = KeyTrials(SimpleNamespace(trial=lambda keys: open_), {}, {"a": 1})  # type: ignore
    assert not trials.fails(frozenset("a"))
    assert [(step.wrong, step.judged) for step in trials.steps] == [(False, False)]
    assert trials.doubt.startswith("1 trial was not judged")


def test_a_key_that_the_bad_configuration_leaves_out_is_left_out() -> None:
    """The keys that are not asked for stay as they are in the good one."""
    asked: list[dict[str, object]] = []

    def outcome(keys: Mapping[str, object]) -> Verdict:
        asked.append(dict(keys))
        return compared([row(site(1, "mlp:out"))])

    bench = SimpleNamespace(trial=outcome)
    trials = KeyTrials(bench, {"a": 1, "b": 1}, {"b": 2, "c": 2})  # type: ignore
    for keys in ("", "a", "b", "ac"):
        trials.fails(frozenset(keys))
    assert asked == [{"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 2}]
