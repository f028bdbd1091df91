"""Tokens near a tie of a router that the candidate does not show: what explains an error there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import make_run, sites, with_references
from test_routing import NOISE, TOKENS, all_steps, feeds, judged, rounded, rounded_steps, row

from layerparity.ground.errors import Exit
from layerparity.judge.references import SiteReference
from layerparity.judge.ties import Supposed, may_be_apart, ties_explain
from layerparity.numbers.clean_slopes import CleanSlopes
from layerparity.numbers.floor import Floor
from layerparity.record.reason import ReasonKind
from layerparity.record.references import ISOLATED
from layerparity.record.verdict import SUPPOSED, Outcome, Verdict
from layerparity.report.headline import coverage_lines
from layerparity.report.reasons import reason

# The golden's experts are 0 and 2: at one token of a sequence expert 3 scores as 2 does.
CLEAR, TIED, TOKEN = torch.tensor([0.9, 0.1, 0.5, 0.2]), torch.tensor([0.9, 0.1, 0.5, 0.4999]), 30
HIDDEN = [f"layers.{n}.mlp.gate:{end}" for n in (0, 1) for end in ("logits", "choices", "weights")]


def compared(tmp_path: Path, off: dict[tuple[int, int], float]) -> Verdict:
    """Compare a candidate without a router, off in block 1 by so much at (sequence, token)."""
    golden = sites(tokens=TOKENS)
    candidate = rounded(golden)
    for (sequence, token), much in off.items():
        for local in (".mlp:out", ":out"):
            candidate[f"layers.1{local}"][sequence, token] += much
    scores = CLEAR.expand(2, TOKENS, 4).clone()
    scores[:, TOKEN] = TIED
    of_blocks = {f"layers.{n}.mlp.gate:scores": scores for n in (0, 1)}
    reference = with_references(tmp_path / "golden", golden, of_blocks, NOISE)
    left = make_run(tmp_path / "golden", golden, reference=reference)
    shown = {text: value for text, value in candidate.items() if text not in HIDDEN}
    return judged(left, make_run(tmp_path / "candidate", shown, skipped=dict.fromkeys(HIDDEN, "")))


def test_a_token_that_a_tie_may_have_routed_apart_is_left_out_and_counted(tmp_path: Path) -> None:
    found = compared(tmp_path, {(0, TOKEN): 0.5})
    assert found.exit is Exit.OK
    assert row(found, "layers.1.mlp:out").metrics[SUPPOSED] == 1
    assert "tokens that may be routed apart: 1 in 1 block, left out" in coverage_lines(found)[-1]


def test_an_error_that_no_tie_explains_fails_where_no_router_was_shown(tmp_path: Path) -> None:
    found = compared(tmp_path, {(0, TOKEN): 0.5, (1, TOKEN - 1): 0.5})
    assert (found.exit, found.where) == (Exit.FAILED, "layers.1.mlp:out")
    assert row(found, "layers.1.self_attn:out").outcome is Outcome.PASS


def reference(values: torch.Tensor, noise: float = 1e-3) -> SiteReference:
    """Return scores, [token, choice], of so much noise (RMS)."""
    square = torch.full((1, len(values)), noise**2 * values.shape[1])
    elements = torch.full((1, values.shape[1]), noise**2 * len(values))
    floor = Floor(("one",), square, elements)
    return SiteReference(values.double(), floor, CleanSlopes({}), ISOLATED)


CHOSEN, EVERY = torch.tensor([[0, 2]]).expand(40, 2), torch.ones(40, dtype=torch.bool)


def test_more_errors_than_ties_explain_are_nobodys_ties() -> None:
    scores = CLEAR.expand(40, 4).clone()
    # Each of ten changes places in about one of six runs.
    scores[:10, 3] = scores[:10, 2] - 2e-3
    few, all_tied = torch.arange(40) < 3, torch.arange(40) < 10
    some, many = (may_be_apart(CHOSEN, off, EVERY, reference(scores)) for off in (few, all_tied))
    assert (some.tokens.sum(), many.tokens.sum()) == (3, 10)
    assert ties_explain([some]) and not ties_explain([many])
    # So do they as decode steps, of which each has one token.
    steps = [Supposed(many.tokens[n : n + 1], many.likely / 40) for n in range(40)]
    assert all(ties_explain([step]) for step in steps) and not ties_explain(steps)


def test_padding_and_clear_choices_are_no_ties() -> None:
    scores = CLEAR.expand(40, 4).clone()
    scores[5:7, 3] = scores[5:7, 2]
    asked = torch.arange(40) != 6
    off = torch.zeros(40, dtype=torch.bool)
    off[[5, 6, 7]] = True
    found = may_be_apart(CHOSEN, off, asked, reference(scores))
    assert found.tokens.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(("second", "tied"), [(0.6999, True), (0.3, False)])
def test_two_groups_of_experts_may_change_places_too(second: float, tied: bool) -> None:
    scores = torch.zeros(40, 4)
    # The router looked into the first group alone, of whose experts both were chosen.
    scores[:, :2] = torch.tensor([0.9, 0.5])
    groups = torch.tensor([0.7, second]).expand(40, 2)
    chosen, off = torch.tensor([[0, 1]]).expand(40, 2), torch.arange(40) == 3
    found = may_be_apart(chosen, off, EVERY, reference(scores), reference(groups))
    assert bool(found.tokens[3]) is tied


@pytest.mark.parametrize(("off", "ended"), [((3,), Exit.OK), ((1, 3, 5), Exit.FAILED)])
def test_decode_steps_are_one_sample_of_a_router_that_nobody_saw(
    tmp_path: Path, off: tuple[int, ...], ended: Exit
) -> None:
    """Noise hardly ever turns such a tie: at one of six steps it may have, at three it has not."""
    golden = all_steps()
    candidate = rounded_steps(golden)
    for step in off:
        for local in (".mlp:out", ":out"):
            candidate[f"layers.1{local}@decode.{step}"] += 0.5
    near = torch.tensor([0.9, 0.1, 0.5, 0.5 - 7 * NOISE])
    shapes = {text: value.shape for text, value in golden.items() if ".gate:logits" in text}
    scores = {
        text.replace("logits", "scores"): (near if "@" in text else CLEAR).expand(shape)
        for text, shape in shapes.items()
    }
    folder, fed = tmp_path / "golden", {"feed": "isolated", "feeds": feeds(golden)}
    reference = with_references(folder, golden, scores, NOISE)
    left = make_run(folder, golden, reference=reference, **fed)
    hidden = [text for text in golden if text.partition("@")[0] in HIDDEN]
    shown = {text: value for text, value in candidate.items() if text not in hidden}
    right = make_run(tmp_path / "candidate", shown, skipped=dict.fromkeys(hidden, ""), **fed)
    found = judged(left, right)
    assert found.exit is ended
    left_out = [each for each in found.rows if each.why and each.why.kind is ReasonKind.UNSEEN_TIES]
    if ended is Exit.OK:
        assert {str(row.site) for row in left_out} == {
            f"layers.1{local}@decode.3" for local in (".mlp:out", ":out")
        }
        assert "this token is near a tie" in reason(left_out[0])
    else:
        assert not left_out and found.where == "layers.1.mlp:out@decode.1"
