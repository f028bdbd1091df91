"""Tokens that two sides routed apart: what of a chain, of decoding and of a site they leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_run, sites, with_references

from layerparity.ground.errors import Exit
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.record.reason import ReasonKind
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row, Verdict

TOKENS = 40
NOISE = 1e-3
# The golden's experts are 0 and 2. Expert 3 scores nearly as 2 does, expert 1 far below.
SCORES = torch.tensor([0.9, 0.1, 0.5, 0.4999])
TIE, WRONG = torch.tensor([0, 3]), torch.tensor([0, 1])


def chained(folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> StoredRun:
    """Write a golden run of two blocks with references of each, fed alone and in a chain."""
    shape = tensors["layers.0.mlp.gate:logits"].shape
    scores = {f"layers.{n}.mlp.gate:scores": SCORES.expand(shape) for n in (0, 1)}
    reference = with_references(folder, tensors, scores, NOISE)
    return make_run(folder, tensors, reference=reference, **changes)


def rounded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what another right computation gives: its numbers differ by half the noise."""
    maker = torch.Generator().manual_seed(2)
    made = dict(tensors)
    for text, value in tensors.items():
        if value.is_floating_point() and not text.startswith("embed_tokens"):
            made[text] = value + 0.5 * NOISE * torch.randn(value.shape, generator=maker)
    for layer in (0, 1):
        before = made[f"layers.{layer - 1}:out"] if layer else made["embed_tokens:out"]
        made[f"layers.{layer}:in"] = before
    return made


def flipped(
    flips: Mapping[tuple[int, int, int], torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a golden's tensors and a candidate's, by (block, sequence, token) of each flip."""
    golden = sites(tokens=TOKENS)
    candidate = rounded(golden)
    for (layer, row, token), experts in flips.items():
        candidate[f"layers.{layer}.mlp.gate:choices"] = chosen = candidate[
            f"layers.{layer}.mlp.gate:choices"
        ].clone()
        chosen[row, token] = experts
    return golden, candidate


def judged(golden: StoredRun, candidate: StoredRun) -> Verdict:
    return conclude([golden], [candidate], CalibratedTolerance())


def compared(tmp_path: Path, flips: Mapping[tuple[int, int, int], torch.Tensor]) -> Verdict:
    golden, candidate = flipped(flips)
    left = chained(tmp_path / "golden", golden)
    return judged(left, make_run(tmp_path / "candidate", candidate))


def row(verdict: Verdict, site: str) -> Row:
    return next(each for each in verdict.rows if str(each.site) == site)


def test_what_follows_a_flip_in_a_chain_is_no_fault_of_a_later_router(tmp_path: Path) -> None:
    found = compared(tmp_path, {(0, 0, 30): TIE, (1, 0, 33): WRONG})
    choices = row(found, "layers.1.mlp.gate:choices")
    assert (choices.outcome, choices.metrics["flips"]) == (Outcome.PASS, 0)
    assert choices.metrics["set_agreement"] == pytest.approx(79 / 80)
    assert found.exit is Exit.OK


@pytest.mark.parametrize("token", [(1, 1, 33), (1, 0, 29)])
def test_a_wrong_choice_of_a_token_without_such_a_history_fails(
    tmp_path: Path, token: tuple[int, int, int]
) -> None:
    found = compared(tmp_path, {(0, 0, 30): TIE, token: WRONG})
    assert found.where == "layers.1.mlp.gate:choices"


def test_few_tokens_without_a_history_show_a_wrong_router_but_no_right_one(tmp_path: Path) -> None:
    early: dict[tuple[int, int, int], torch.Tensor] = {(0, 0, 3): TIE, (0, 1, 5): TIE}
    right = compared(tmp_path / "right", early)
    choices = row(right, "layers.1.mlp.gate:choices")
    assert choices.why is not None
    assert (choices.outcome, choices.why.kind) == (
        Outcome.INCONCLUSIVE,
        ReasonKind.ROUTED_APART_IN_CHAIN,
    )
    wrong = compared(tmp_path / "wrong", {**early, (1, 1, 4): WRONG})
    assert wrong.where == "layers.1.mlp.gate:choices"


def test_padding_that_is_routed_apart_is_no_history(tmp_path: Path) -> None:
    golden, candidate = flipped({(0, 1, 0): WRONG, (0, 1, 1): WRONG})
    mask = torch.ones(2, TOKENS)
    mask[1, :2] = 0
    left = chained(tmp_path / "golden", golden, mask=mask)
    found = judged(left, make_run(tmp_path / "candidate", candidate, mask=mask))
    assert row(found, "layers.1.mlp:out").metrics["agreeing_tokens"] == 1.0
    assert found.exit is Exit.OK
