"""Tokens that two sides routed apart: what of a chain, of decoding and of a site they leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_run, sites, with_references

from layerparity.anatomy.site import Site
from layerparity.ground.errors import Exit
from layerparity.ground.files import tensor_digest
from layerparity.judge.again import judge_again
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.record.manifest import Feed
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.headline import coverage_lines, headline, whole_model
from layerparity.report.reasons import reason

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


STEPS = 6


def decoded(
    tmp_path: Path, flips: Mapping[int, torch.Tensor], port: Mapping[str, Any] | None = None
) -> Verdict:
    """Compare a prefill and decode steps of which layer 1 chose otherwise at some, by step."""
    golden = all_steps()
    candidate = rounded_steps(golden)
    for step, experts in flips.items():
        name = f"layers.1.mlp.gate:choices@decode.{step}"
        candidate[name] = experts.view(1, 1, 2)
    shape = {text: value.shape for text, value in golden.items() if ".gate:logits" in text}
    scores = {text.replace("logits", "scores"): SCORES.expand(size) for text, size in shape.items()}
    folder = tmp_path / "golden"
    fed = {"feed": "isolated", "feeds": feeds(golden)}
    left = make_run(folder, golden, reference=with_references(folder, golden, scores, NOISE), **fed)
    return judged(left, make_run(tmp_path / "candidate", candidate, **fed, **(port or {})))


FED = {
    "embed_tokens": "embed_tokens:in",
    "layers.0": "layers.0:in",
    "layers.1": "layers.1:in",
    "norm": "layers.1:out",
    "lm_head": "norm:out",
}


def feeds(golden: Mapping[str, torch.Tensor]) -> list[Feed]:
    """Return that each stage was fed what the golden had there, at every step."""
    sites = [
        (stage, text if not step else f"{text}@decode.{step}")
        for step in range(STEPS + 1)
        for stage, text in FED.items()
    ]
    return [
        Feed(stage, Site.parse(text), tensor_digest(golden[text]), "golden")
        for stage, text in sites
    ]


def all_steps() -> dict[str, torch.Tensor]:
    """Return a golden's numbers, of one sequence: a prefill and decode steps."""
    return {
        text if not step else f"{text}@decode.{step}": value if not step else value[:1, -1:].clone()
        for step in range(STEPS + 1)
        for text, value in sites(step, batch=1, tokens=TOKENS).items()
    }


def rounded_steps(golden: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a right computation's numbers; every block was fed the golden's own."""
    maker = torch.Generator().manual_seed(3)
    return {
        text: value + 0.5 * NOISE * torch.randn(value.shape, generator=maker)
        if value.is_floating_point() and ":in" not in text and "embed_tokens" not in text
        else value
        for text, value in golden.items()
    }


def test_a_tie_at_one_decode_step_leaves_a_pass_and_is_counted(tmp_path: Path) -> None:
    found = decoded(tmp_path, {2: TIE})
    assert (found.exit, whole_model(found)) == (Exit.OK, "pass")
    left_out = [each for each in found.rows if each.outcome is Outcome.SKIPPED]
    assert {str(each.site) for each in left_out} == {
        f"layers.1{local}@decode.2" for local in (".mlp.gate:weights", ".mlp:out", ":out")
    }
    assert all(each.why == Reason(ReasonKind.TIES, {"share": 5 / 6}) for each in left_out)
    assert "83.3 % of the tokens of such steps are judged" in reason(left_out[0])
    assert "tokens routed apart: 1 in 1 block, all by ties" in coverage_lines(found)
    again = judge_again(found, CalibratedTolerance())
    assert (again.rows, again.outcome) == (found.rows, found.outcome)


def test_a_wrong_choice_at_one_decode_step_fails(tmp_path: Path) -> None:
    found = decoded(tmp_path, {2: WRONG})
    assert found.where == "layers.1.mlp.gate:choices@decode.2"
    assert row(found, "layers.1.mlp:out@decode.2").outcome is Outcome.INCONCLUSIVE
    assert "1 of them by no tie" in " ".join(coverage_lines(found))


def test_ties_at_most_decode_steps_are_no_pass(tmp_path: Path) -> None:
    found = decoded(tmp_path, dict.fromkeys((1, 2, 3, 4), TIE))
    assert found.exit is Exit.INCONCLUSIVE
    assert whole_model(found).startswith("inconclusive")
    assert headline(found).startswith("INCONCLUSIVE: 8 of 126 sites: only 0 % of the tokens were")
    assert "use port.replay=true" in headline(found)


def test_the_worst_token_is_named_by_its_position_in_its_prompt(tmp_path: Path) -> None:
    golden, candidate = flipped({(0, 0, 3): TIE, (0, 1, 7): TIE})
    mask = torch.ones(2, TOKENS)
    mask[1, :2] = 0
    candidate["layers.0.mlp:out"] = candidate["layers.0.mlp:out"].clone()
    candidate["layers.0.mlp:out"][1, 12] *= 3
    left = chained(tmp_path / "golden", golden, mask=mask)
    found = judged(left, make_run(tmp_path / "candidate", candidate, mask=mask))
    wrong = row(found, "layers.0.mlp:out")
    assert wrong.metrics["error_ratio_position_index"] == 10
    assert "error at position 10 of prompt 1 is" in reason(wrong)


def test_another_number_of_experts_is_the_router_s_failure(tmp_path: Path) -> None:
    golden = sites(tokens=TOKENS)
    candidate = rounded(golden)
    wider = torch.tensor([0, 2, 3]).expand(2, TOKENS, 3).clone()
    candidate["layers.1.mlp.gate:choices"] = wider
    candidate["layers.1.mlp.gate:weights"] = torch.rand(2, TOKENS, 3)
    candidate["layers.1.mlp:out"] = candidate["layers.1.mlp:out"] * 1.5
    left = chained(tmp_path / "golden", golden)
    found = judged(left, make_run(tmp_path / "candidate", candidate))
    wrong = row(found, "layers.1.mlp.gate:choices")
    assert found.where == str(wrong.site)
    assert reason(wrong) == "shape [2, 40, 2] against [2, 40, 3]: not as many by channel"
    assert "router_bias_dropped" not in {each.id for each in found.causes}
    assert whole_model(found).startswith("fail")


def test_another_number_of_channels_fails_and_of_tokens_cannot_be_judged(tmp_path: Path) -> None:
    golden = sites(tokens=TOKENS)
    candidate = {**golden, "layers.0.mlp:out": golden["layers.0.mlp:out"][..., :4]}
    candidate["layers.0.self_attn:out"] = golden["layers.0.self_attn:out"][:, 1:]
    left = chained(tmp_path / "golden", golden)
    found = judged(left, make_run(tmp_path / "candidate", candidate))
    assert found.where == "layers.0.mlp:out"
    padded = row(found, "layers.0.self_attn:out")
    assert (padded.outcome, padded.why and padded.why.kind) == (
        Outcome.INCONCLUSIVE,
        ReasonKind.PADDED,
    )


@pytest.mark.parametrize(("times", "outcome"), [(5, Outcome.INCONCLUSIVE), (20, Outcome.FAIL)])
def test_a_wider_type_that_is_further_off_than_the_goldens_own_rounding_fails(
    tmp_path: Path, times: float, outcome: Outcome
) -> None:
    """The golden has no floor of it; what its own type does bounds what a wider one may do."""
    noise, made = 1e-3, sites()
    marked = {"reference": with_references(tmp_path / "golden", made, noise=noise)}
    golden = make_run(tmp_path / "golden", made, **marked)
    off = times * noise * torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    other = made | {"layers.1.mlp:out": made["layers.1.mlp:out"] + off}
    candidate = make_run(tmp_path / "wide", other, dtype="float64", kind="candidate")
    verdict = conclude([golden], [candidate], CalibratedTolerance())
    rows = {str(row.site): row for row in verdict.rows}
    assert rows["layers.1.mlp:out"].outcome is outcome
    assert rows["layers.0.mlp:out"].outcome is Outcome.INCONCLUSIVE
    # A narrower type may be further off than the golden's.
    candidate = make_run(tmp_path / "narrow", other, dtype="bfloat16", kind="candidate")
    verdict = conclude([golden], [candidate], CalibratedTolerance())
    rows = {str(row.site): row for row in verdict.rows}
    assert rows["layers.1.mlp:out"].outcome is Outcome.INCONCLUSIVE
