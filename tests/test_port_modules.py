"""What passes a port's modules is noted, and what they hold is found through its converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folders
import pytest
import torch
from conftest import ROOT
from torch import nn

from layerparity.anatomy.family import CHOICES, HEADS, HIDDEN, family_of
from layerparity.ground.errors import UserError
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.prints import against
from layerparity.porting import recorded
from layerparity.ports.nxdi.port_modules import held_through, prints_through, watched
from layerparity.ports.ranks.answers import Answers
from layerparity.ports.ranks.port import prints_of
from layerparity.record.manifest import SitePatterns
from layerparity.record.ranks import RankRecord

Tensors = dict[str, torch.Tensor]
STAGE = "layers.0"
ATTENTION = f"model.{STAGE}.self_attn"
EVERY = SitePatterns("all", ("*",))


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(ROOT / "checkpoints/tiny_minimax_m2")


class Fused(nn.Module):
    """Q and K in one weight, K twice, as four ranks would hold two key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(128 + 2 * 64, 96))
        self.norm = nn.Parameter(torch.zeros(96))


def fused(stored: Tensors) -> Tensors:
    q, k = (stored[f"{ATTENTION}.{name}_proj.weight"] for name in "qk")
    norm = stored[f"model.{STAGE}.input_layernorm.weight"]
    return {"qk": torch.cat([q, k, k]).float(), "norm": norm.float()}


def filled(checkpoint: Checkpoint, convert: Callable[[Tensors], Tensors] = fused) -> Fused:
    module = Fused()
    module.load_state_dict(convert(checkpoint.read(checkpoint.of_stage(STAGE))[0]))
    return module.requires_grad_(False)


def judged(checkpoint: Checkpoint, module: Fused) -> dict[str, str]:
    prints = against(checkpoint, prints_through(fused, checkpoint, STAGE, module))
    return {name.rpartition(f"{STAGE}.")[2]: each.checkpoint for name, each in prints.items()}


def test_what_is_fused_and_doubled_is_put_back(checkpoint: Checkpoint) -> None:
    right = dict.fromkeys(("self_attn.q_proj.weight", "self_attn.k_proj.weight"), "equal")
    module = filled(checkpoint)
    assert judged(checkpoint, module) == right | {"input_layernorm.weight": "equal"}
    held = held_through(fused, checkpoint, STAGE, module)
    assert not any(each.differs for each in held.values())
    assert all(bool(each.mask.all()) for each in held.values())


@pytest.mark.parametrize("row", [130, 200])
def test_either_copy_that_is_wrong_is_found(checkpoint: Checkpoint, row: int) -> None:
    module = filled(checkpoint)
    module.qk[row] += 1
    assert judged(checkpoint, module)["self_attn.k_proj.weight"] == "differs"
    assert judged(checkpoint, module)["self_attn.q_proj.weight"] == "equal"


def test_what_a_rank_has_not_is_masked(checkpoint: Checkpoint) -> None:
    def half(stored: Tensors) -> Tensors:
        return {"qk": fused(stored)["qk"][:64], "norm": fused(stored)["norm"]}

    module = filled(checkpoint)
    module.qk = nn.Parameter(module.qk[:64].clone(), requires_grad=False)
    held = held_through(half, checkpoint, STAGE, module)
    mask = held[f"{ATTENTION}.q_proj.weight"].mask
    assert mask[:64].all()
    assert not mask[64:].any()
    # The converter did not put K anywhere: it is not held.
    assert f"{ATTENTION}.k_proj.weight" not in held


def test_what_ranks_hold_has_a_print_whatever_its_parameter_is_called(
    checkpoint: Checkpoint,
) -> None:
    """Two ranks hold half of Q each, under a name of their own; of one a row is wrong."""

    def answer(rank: int, wrong: bool = False) -> tuple[dict[str, Any], Tensors]:
        rows = slice(64 * rank, 64 * rank + 64)

        def part(stored: Tensors) -> Tensors:
            return {"qk": fused(stored)["qk"][rows], "norm": fused(stored)["norm"]}

        module = filled(checkpoint)
        module.qk = nn.Parameter(module.qk[rows].clone(), requires_grad=False)
        module.qk[5] += wrong
        side = SimpleNamespace(held=lambda stage: held_through(part, checkpoint, stage, module))
        return Answers._held(SimpleNamespace(side=side), {"stage": STAGE}, {})  # type: ignore[arg-type]

    q, norm = f"{ATTENTION}.q_proj.weight", f"model.{STAGE}.input_layernorm.weight"
    assets = SimpleNamespace(checkpoint=checkpoint)
    for wrong in (False, True):
        ranks = RankRecord(2)
        prints = prints_of([answer(0), answer(1, wrong)], assets, ranks)  # type: ignore[arg-type]
        found = {name: each.checkpoint for name, each in against(checkpoint, prints).items()}
        # K stands nowhere on these two: no rank holds it, and it has no print.
        assert found == {q: "differs" if wrong else "equal", norm: "equal"}
        assert ranks.weights == ({q: (1,)} if wrong else {})


def test_a_converter_that_computes_is_refused_with_the_name(checkpoint: Checkpoint) -> None:
    def shifted(stored: Tensors) -> Tensors:
        made = fused(stored)
        return made | {"norm": made["norm"] + 0.5}

    with pytest.raises(UserError, match=r"computes with model\.layers\.0\.input_layernorm\.weight"):
        prints_through(shifted, checkpoint, STAGE, filled(checkpoint, shifted))


class Chain(nn.Module):
    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.twice = nn.Identity(), nn.Tanh(), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x + 1))
        x = self.two(x) if self.twice else x
        return x.add_(7)


def test_what_modules_return_is_noted_as_it_was_then() -> None:
    given = torch.zeros(1, 2, 3)
    module = Chain()
    with watched(module, {"mlp:in": "two", "mlp:out": "two", "self_attn:out": "one"}) as seen:
        module(given)
    # What is added in place afterwards is not in it.
    assert torch.equal(seen["mlp:out"], torch.tanh(given + 1))
    assert torch.equal(seen["mlp:in"], given + 1)
    assert torch.equal(seen["self_attn:out"], given + 1)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_what_runs_twice_or_never_is_left_out() -> None:
    module = Chain(twice=True)
    with watched(module, {"mlp:out": "two", "self_attn:out": "one"}) as seen:
        module(torch.zeros(1, 2, 3))
    assert set(seen) == {"self_attn:out"}


def test_a_module_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(UserError, match="mlp:out is to be seen at 'three', which Chain has not"),
        watched(Chain(), {"mlp:out": "three"}),
    ):
        pass


def test_a_family_lists_the_sites_of_a_stage_with_their_axes() -> None:
    family = family_of("minimax_m2")
    sites = family.sites("layers.3", EVERY)
    assert (sites["mlp:out"], sites["self_attn:context"]) == (HIDDEN, HEADS)
    assert sites["mlp.gate:choices"] == CHOICES
    assert {
        site.partition(".")[0].partition(":")[0] for site in family.sites("layers.3.mlp", EVERY)
    } == {"mlp"}
    assert family.sites("layers.3", SitePatterns("few", ("*mlp:out",))).keys() == {"mlp:out"}
    assert family.sites("lm_head", EVERY) == {}


def test_a_stage_has_its_own_stored_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert checkpoint.of_stage("lm_head") == ["lm_head.weight"]
    assert all(name.startswith("model.layers.1.") for name in checkpoint.of_stage("layers.1"))
    every = ["embed_tokens", "norm", "lm_head", *(f"layers.{n}" for n in range(6))]
    stages = [name for stage in every for name in checkpoint.of_stage(stage)]
    assert sorted(stages) == sorted(checkpoint.tensors)
    tied = Checkpoint(folders.llama(tmp_path / "tied", tie_word_embeddings=True))
    assert tied.of_stage("lm_head") == tied.of_stage("embed_tokens") != []


def test_a_program_reads_what_a_golden_was_fed_and_recorded(
    run: Callable[..., object], store: Path
) -> None:
    golden = recorded("the-golden", str(store))
    inputs = golden.inputs()
    assert set(inputs) == {"token_ids", "attention_mask", "position_ids"}
    assert {each.dtype for each in inputs.values()} == {torch.int64}
    hidden = golden.tensor("layers.1:in")
    assert hidden.shape[:2] == inputs["token_ids"].shape
    assert torch.equal(hidden, golden.tensor("layers.0:out"))
    assert golden.sites[0] == "embed_tokens:in"
    assert golden.checkpoint.config["model_type"] == "minimax_m2"
    with pytest.raises(
        UserError, match=r"holds nothing at layers\.1:inn\. Did you mean 'layers\.1"
    ):
        golden.tensor("layers.1:inn")
    with pytest.raises(UserError, match="another"):
        recorded("another", str(store))
