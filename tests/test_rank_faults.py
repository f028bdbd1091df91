"""Faults of sharding: each is found, named, and says which rank, where the numbers tell it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging.runs import CorpusRunner
from test_exact import FACTS, GIVEN, HEADS, RIGHT, TOKENS, WEIGHT, drawn, norm, pair, seen, shown
from test_replays import LAYER, SMALL, case, found, runner  # noqa: F401

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.shards import spans
from layerparity.judge.ranks import makers_of, routed_to
from layerparity.judge.weights_diff import diff_weights
from layerparity.mistakes.catalogue import known_fault, suspected
from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.norms import normed_by_head, rms_normed
from layerparity.mistakes.ranks import keep_slice, ranks_of, tilings
from layerparity.mistakes.replayed import Replayed
from layerparity.model.prints import print_of
from layerparity.numbers.rank_parts import left_with, slice_alone
from layerparity.record.guilt import SHOWN, SIGNS, Cause
from layerparity.record.ranks import Sharding
from layerparity.record.verdict import Outcome
from layerparity.record.weights import Fate, WeightFinding
from layerparity.report.weights import finding_text


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


def test_a_weight_that_never_came_is_no_slice_of_one_channel_that_is_1() -> None:
    held = WEIGHT.clone()
    held[0] = 1.0
    sites = {
        "self_attn.q_proj:out": pair(GIVEN),
        "self_attn.q_norm:out": pair(rms_normed(GIVEN, 1e-6) * held, rms_normed(GIVEN, 1e-6)),
    }
    given = ("self_attn.q_proj:out",)
    own = seen("self_attn.q_norm", "self_attn.q_norm:out", sites, good=given)
    assert "weight_sliced_per_rank" not in shown(own)


def test_a_rank_s_slice_may_stand_in_every_place_or_in_another_rank_s() -> None:
    parts = WEIGHT.chunk(2, -1)
    quarters = WEIGHT.chunk(4, -1)

    def told(*own: torch.Tensor, degree: str = "1") -> list[str]:
        evidence = norm(rms_normed(GIVEN, 1e-6) * torch.cat(own, -1))
        facts = {**evidence.facts, "tp_degree": degree}
        causes = suspected(replace(evidence, facts=facts))
        own = [each for each in causes if each.id == "weight_sliced_per_rank"]
        # What is said of a slice alone is not said of one that stands for another.
        assert all(("alone" in each.sentence) == ("alone" in each.reasons[0]) for each in own)
        return [each.sentence for each in own]

    again = told(parts[1], parts[1])
    assert len(again) == 1
    assert "rank 1 has its slice of 2 alone" in again[0]
    assert "all others multiplied by that slice again" in again[0]
    others = (quarters[0], quarters[3], quarters[2], quarters[3])
    assert told(*others, degree="4") == ["rank 1 of 4 has rank 3's slice of the weight for its own"]
    # Of as many ranks as there are, no other slice gives these numbers; nor does one half as large.
    assert told(*others, degree="2") == []
    assert told(quarters[0], 0.5 * quarters[3], *quarters[2:], degree="4") == []
    assert told(WEIGHT, degree="4") == []


def test_a_slice_of_a_weight_is_told_from_one_that_was_never_loaded() -> None:
    drawn_at = torch.Generator().manual_seed(4)
    stored, random = (1 + torch.randn(64, generator=drawn_at) for _ in range(2))
    slices = spans(64, 4)
    first, end = slices[1]
    for others, held in left_with(stored, first, end):
        assert slice_alone(held, stored, slices) == (16, 32), others
        # A span that no rank has, and a slice that is not the checkpoint's to the bit.
        assert slice_alone(held, stored, spans(64, 2)) == ()
        changed = held.clone()
        changed[first] += 1e-6
        assert slice_alone(changed, stored, slices) == ()
    for held in (random, torch.ones(64), stored, stored[:16]):
        assert slice_alone(held, stored, slices) == ()


def test_a_finding_on_a_slice_names_the_rank_that_has_it() -> None:
    stored = 1 + torch.randn(64, generator=torch.Generator().manual_seed(4))
    held = next(own for _, own in left_with(stored, 16, 32))
    right, name = print_of(stored), "model.layers.0.input_layernorm.weight"
    target = "layers.0.input_layernorm.weight"

    def found_of(kept: tuple[int, ...]) -> WeightFinding:
        own = replace(print_of(held, target), checkpoint="differs", expected=right, kept=kept)
        return diff_weights({}, {"layers.0": {name: own}}, {}, Blocks())[0]

    cut, lost = found_of((16, 32)), found_of(())
    # By its sketch alone it has nothing to do with what it should be.
    assert (lost.what, lost.fate) == ("never_loaded", Fate.UNRELATED)
    assert (cut.what, cut.fate) == ("changed_value", Fate.SLICED)
    assert finding_text(cut) == (
        "layers.0.input_layernorm: weight was cut: 16 to 31 of 64 alone are the checkpoint's"
    )

    def causes(finding: WeightFinding) -> list[str]:
        facts = {"tp_degree": "4"}
        evidence = Evidence("input_layernorm", layer=0, findings=(finding,), facts=facts)
        return [each.sentence for each in suspected(evidence)]

    assert causes(cut)[0].startswith(f"rank 1 has its slice of 4 alone of {name}")
    assert not any("slice" in each for each in causes(lost))


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
    shown = Cause("o_proj_bias_per_rank", "", grade=SHOWN, confidence=1.0)
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
