"""What a side shows twice, and the other does not, is said; what a model computes twice is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import STAGES, block_input, make_run, sites

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import kinds_of
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.manifest import Feed
from layerparity.record.stored_run import StoredRun
from layerparity.report.cautions import warning_lines

MEASURED = kinds_of({0: SERIAL, 1: SERIAL})
Tensors = dict[str, torch.Tensor]


def found(golden: StoredRun, candidate: StoredRun) -> list[Caution]:
    verdict = conclude([golden], [candidate], FixedTolerance())
    twice = (CautionKind.REPEATED_TENSOR, CautionKind.UNCHANGED_STEP)
    cautions = [each for each in verdict.cautions if each.kind in twice]
    assert len([line for line in warning_lines(verdict) if "same tensor" in line]) == len(cautions)
    return cautions


def repeating(*locals_: str) -> Tensors:
    """Return sites of which the second block shows some as the first one did."""
    made = sites()
    return made | {f"layers.1.{local}": made[f"layers.0.{local}"] for local in locals_}


def test_one_tensor_in_two_layers_is_said(tmp_path: Path) -> None:
    golden = make_run(tmp_path / "golden", sites(), blocks=MEASURED)
    candidate = make_run(tmp_path / "candidate", repeating("mlp:out", "self_attn:out"))
    (caution,) = found(golden, candidate)
    assert (caution.kind, caution.side) == (CautionKind.REPEATED_TENSOR, "candidate")
    first = {"other": "layers.0.self_attn:out", "site": "layers.1.self_attn:out", "count": 2}
    assert caution.values == first


def test_what_the_golden_shows_as_well_is_the_models_own(tmp_path: Path) -> None:
    """Keys may be shared by two layers. What blocks add may not, unless they were measured."""
    keys = {f"layers.{layer}.self_attn:k_rotated": sites()["norm:out"] for layer in (0, 1)}
    both = repeating("self_attn:out") | keys
    for blocks, sides in ((MEASURED, []), ((), ["golden", "candidate"])):
        folder = tmp_path / str(len(blocks))
        golden, candidate = (
            make_run(folder / role, both, blocks=blocks) for role in ("golden", "candidate")
        )
        cautions = found(golden, candidate)
        assert [(each.side, each.values["count"]) for each in cautions] == [(s, 1) for s in sides]


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, 5, 8), torch.full((2, 5, 8), torch.nan), torch.arange(10.0).view(2, 5, 1)],
    ids=["one number", "NaN", "few numbers"],
)
def test_what_may_be_equal_by_chance_is_not_said(tmp_path: Path, value: torch.Tensor) -> None:
    """So may the choice of experts, which two blocks of every run here share."""
    again = {f"layers.{layer}.self_attn:out": value for layer in (0, 1)}
    apart = {name: torch.randn(value.shape) for name in again}
    golden = make_run(tmp_path / "golden", sites() | apart, blocks=MEASURED)
    assert found(golden, make_run(tmp_path / "candidate", sites() | again)) == []


def decoded(changed: bool, fed_changes: bool = True) -> tuple[Tensors, list[Feed]]:
    """Return sites with two decode steps, and what the blocks were fed in each pass."""
    made, feeds = sites(), []
    for step in (1, 2):
        drawn = sites(seed=step if changed else 9)
        inputs = sites(seed=step if fed_changes else 9)
        for name in ("layers.0.mlp:out", "layers.1.mlp:out"):
            made[f"{name}@decode.{step}"] = drawn[name]
        for stage in STAGES:
            site = block_input(stage).at_step(step)
            digest = str(inputs.get(str(block_input(stage)), torch.zeros(1)).sum().item())
            feeds.append(Feed(stage, site, digest, "golden"))
    return made, feeds


@pytest.mark.parametrize("fed_changes", [True, False])
def test_a_step_that_shows_what_the_last_one_did_is_said(tmp_path: Path, fed_changes: bool) -> None:
    """Unless its block was fed the same: what does not know its place is the same then."""
    right, feeds = decoded(changed=True, fed_changes=fed_changes)
    golden = make_run(tmp_path / "golden", right, feeds=feeds, blocks=MEASURED)
    wrong, _ = decoded(changed=False)
    cautions = found(golden, make_run(tmp_path / "candidate", wrong, feeds=feeds))
    assert [each.kind for each in cautions] == [CautionKind.UNCHANGED_STEP] * fed_changes
    for each in cautions:
        steps = {"other": "layers.0.mlp:out@decode.1", "site": "layers.0.mlp:out@decode.2"}
        assert each.values == {**steps, "count": 2}
