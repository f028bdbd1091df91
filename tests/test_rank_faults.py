"""Faults of sharding: each is found, named, and says which rank, where the numbers tell it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exact import FACTS, GIVEN, HEADS, RIGHT, TOKENS, WEIGHT, drawn, norm, pair, seen, shown
from test_replays import LAYER, SMALL, case, found, runner  # noqa: F401

from layerparity.anatomy.shards import spans
from layerparity.judge.ranks import makers_of, routed_to
from layerparity.mistakes.catalogue import known_fault, suspected
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import normed_by_head, rms_normed
from layerparity.mistakes.ranks import keep_slice, ranks_of, tilings
from layerparity.mistakes.replayed import Replayed
from layerparity.record.guilt import SHOWN, SIGNS, Cause
from layerparity.record.ranks import Sharding
from layerparity.record.verdict import Outcome
from layerparity.selftest.corpus_runs import CorpusRunner


def sliced(path: str, degree: int, rank: int, filled: float) -> Fault:
    """A weight of which a rank has its slice alone."""

    def plant(block: Any, surgery: Surgery) -> None:
        keep_slice(block.get_parameter(path), degree, rank, filled)

    return Fault("sliced", "", path.rpartition(".")[0], "weight_sliced_per_rank", plant=plant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("weight_sliced_per_rank", "rank 0 has its slice of 2 alone"),
        (sliced("post_attention_layernorm.weight", 4, 2, 0.0), "channels 24 to 35 are right"),
        (sliced("self_attn.q_norm.weight", 2, 1, 1.0), "rank 1 has its slice of 2 alone"),
        (sliced("mlp.gate.weight", 2, 1, 0.0), "experts 4 to 7 are right, all others 0"),
        ("kv_heads_tiled", "KV heads are tiled over 4 ranks"),
        ("qk_norm_per_rank", "over each of 2 shares of the heads, as ranks do"),
        ("attention_not_reduced", "rank 0's partial sum of 2 alone"),
        ("experts_of_next_rank", "rank 0 of 2 holds the experts of rank 1"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.component,
)
def test_a_fault_of_sharding_is_named_with_its_rank(
    runner: CorpusRunner,  # noqa: F811
    tmp_path: Path,
    fault: str | Fault,
    says: str,
    dtype: str,
) -> None:
    planted = known_fault(fault) if isinstance(fault, str) else fault
    verdict = runner.verdict(case(SMALL["minimax_m2"], dtype, planted), tmp_path / "run")
    assert verdict.outcome is Outcome.FAIL
    assert verdict.guilty is not None
    assert verdict.guilty.layer == LAYER
    assert verdict.guilty.component == planted.component
    assert verdict.causes[0].id == planted.cause
    assert verdict.causes[0].shown
    assert says in verdict.causes[0].sentence


# ---------------------------------------------------------------- on stored tensors
def cut(first: int, end: int, filled: float) -> torch.Tensor:
    own = torch.full_like(WEIGHT, filled)
    own[..., first:end] = WEIGHT[..., first:end]
    return rms_normed(GIVEN, 1e-6) * own


def test_a_weight_that_is_not_a_rank_s_slice_is_not_called_one() -> None:
    width = WEIGHT.shape[-1]
    half = width // 2
    assert shown(norm(cut(0, half, 1.0))) == ["weight_sliced_per_rank"]
    assert shown(norm(cut(half, width, 0.0))) == ["weight_sliced_per_rank"]
    # No rank has these channels, and what is beyond a slice was never loaded, not half as large.
    assert "weight_sliced_per_rank" not in shown(norm(cut(1, half, 1.0)))
    assert "weight_sliced_per_rank" not in shown(norm(cut(0, half - 1, 1.0)))
    assert "weight_sliced_per_rank" not in shown(norm(cut(0, half, 0.5)))
    assert "weight_sliced_per_rank" not in shown(norm(RIGHT))


def test_logits_of_a_slice_of_the_experts_are_those_of_one_rank() -> None:
    logits = drawn(TOKENS, 8)

    def routed(candidate: torch.Tensor) -> list[str]:
        sites = {"mlp.gate:logits": pair(logits, candidate)}
        return shown(seen("mlp.gate", "mlp.gate:logits", sites))

    zeros = torch.zeros_like(logits)
    at = torch.arange(8)
    assert routed(torch.where((at >= 2) & (at < 4), logits, zeros)) == ["weight_sliced_per_rank"]
    assert routed(torch.where((at >= 1) & (at < 3), logits, zeros)) == []
    assert routed(torch.where(at < 4, logits, 0.1 * drawn(TOKENS, 8))) == []


def test_with_one_head_a_rank_a_norm_is_over_each_rank_s_heads_and_over_each_head() -> None:
    """Four heads: over two ranks the two readings differ, over four they are one."""
    seen_so = norm(normed_by_head(GIVEN, 1e-6, HEADS) * WEIGHT)
    for degree in (1, 2, HEADS):
        expected = "qk_norm_per_rank" if degree == HEADS else "qk_norm_per_head"
        known = replace(seen_so, facts={**FACTS, "tp_degree": str(degree)})
        (cause,) = (each for each in suspected(known) if each.shown)
        assert cause.id == expected
        assert ("with one head a rank both are the same" in cause.sentence) == (degree == HEADS)
        assert cause.alike == (("qk_norm_per_head",) if degree == HEADS else ())


def test_the_rank_is_named_to_whose_experts_all_wrong_tokens_went() -> None:
    """Eight experts on four ranks, two a token: every other rank is refuted by a wrong token."""
    chosen = torch.tensor([[a, b] for a in range(8) for b in range(8) if a != b])
    right = drawn(len(chosen), 6)
    held = Sharding.of("expert", (range(*span) for span in spans(8, 4)))
    of_rank = (chosen // 2 == 1).any(1)

    def named(wrong: torch.Tensor, chosen: torch.Tensor = chosen) -> set[int]:
        size = len(chosen)
        values = pair(
            right[:size], torch.where(wrong[:size, None], 1.5 * right[:size], right[:size])
        )
        return routed_to(values, chosen, held)

    assert named(of_rank) == {1}
    # One of its two experts is enough; one wrong token that none of its experts had is too many.
    assert named((chosen == 3).any(1)) == {1}
    assert named(of_rank | (chosen == 7).any(1)) == set()
    # Nothing is said where no token is right, where none is wrong, and of too few to tell.
    assert named(torch.ones_like(of_rank)) == set()
    assert named(torch.zeros_like(of_rank)) == set()
    assert named(of_rank & (chosen // 2 == 3).any(1)) == set()


def test_mistakes_shown_say_whose_they_are() -> None:
    def made(*ranks: int | None, degree: int = 4) -> tuple[int, ...]:
        faults = (Fault(str(rank), "", "", "", degree=degree, rank=rank) for rank in ranks)
        return Replayed(tuple(faults)).ranks(4)

    assert made(2) == (2,)
    # Every rank makes it; two that give the same numbers leave it open, and so does another degree.
    assert made(None) == (0, 1, 2, 3)
    assert made(1, 2) == made(1, None) == made() == ()
    assert made(1, degree=2) == made(None, degree=1) == ()
    shown = Cause("o_proj_bias_per_rank", 1.0, "", grade=SHOWN)
    assert makers_of([shown], 4) == (0, 1, 2, 3)
    assert makers_of([replace(shown, grade=SIGNS)], 4) == makers_of([shown], 1) == ()
    # One rank has its slice alone, and nothing says which.
    assert makers_of([replace(shown, id="weight_sliced_per_rank")], 4) == ()


def test_kv_heads_are_tiled_where_ranks_hold_them_so() -> None:
    # 8 query heads, 2 KV heads: over 4 ranks, each has 2 query heads; over 8, one.
    assert tilings(8, 2) == {(0, 1) * 4: 8, (0, 0, 1, 1) * 2: 4}
    # Padded to 64 for MiniMax-M2, ranks with zeros are skipped.
    assert tilings(48, 8)[tuple(range(6)) * 8] == 64
    # A run's own degree is said before others that come to the same.
    assert tilings(8, 2, 16)[(0, 1) * 4] == 16
    # Where each query head has keys of its own, none is repeated.
    assert tilings(4, 4) == {}
    assert 2 not in tilings(4, 2).values()


def test_few_ranks_are_tried_one_by_one_and_many_by_their_first() -> None:
    tried = list(ranks_of(64))
    assert [rank for degree, rank in tried if degree == 8] == list(range(8))
    assert [rank for degree, rank in tried if degree == 32] == [0]
    assert {degree for degree, _ in ranks_of(12, even=True)} == {2, 4}
