"""Attention that chooses its tokens: a set of indices, with ties, as a router's experts are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from conftest import Ended
from test_port_hf import padded_batch, port_of, run_all
from test_recording import engine, recorded
from torch import nn

from layerparity.ground.errors import Exit
from layerparity.judge.references import SiteReference
from layerparity.judge.ties import flips
from layerparity.numbers.arithmetic import Mode, Replay
from layerparity.numbers.floor import Floor
from layerparity.ports.base import Call, Observed
from layerparity.ports.observed.canonical import chosen_tokens
from layerparity.record.references import ISOLATED

CHOICES = "layers.0.self_attn.indexer:choices"
PORTS = """
import torch
from layerparity.numbers.arithmetic import Mode
from layerparity.ports.known.hf import HfPort


class OwnTopK(Mode):
    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def run(self, func, args, named):
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] < 20:
            return func(*args, **named)
        scores = torch.where(args[0] < -1e30, args[0], self.sign * args[0])
        found = func(scores.flip(-1), *args[1:], **named)
        return torch.return_types.topk((found.values, scores.shape[-1] - 1 - found.indices))


class LateTies(HfPort):
    sign = 1

    def run(self, stage, given):
        with OwnTopK(self.sign):
            return super().run(stage, given)


class WorstFirst(LateTies):
    sign = -1
"""


@pytest.fixture(scope="module")
def golden(store: Path) -> tuple[str, ...]:
    """Return the keys of a run of the small model on forty tokens."""
    tokens = store / "tokens.json"
    tokens.write_text(json.dumps([[3 + 7 * n % 290 for n in range(40)]]))
    return (
        "backend=gpu",
        "device_map=cpu",
        "threads=1",
        f"model.path={folders.deepseek_v32(store / 'deepseek_v32')}",
        "scope=single",
        "layer=0",
        "capture=components",
        f"tracking.folder={store}",
    )


def test_ties_of_an_indexer_are_excused_and_a_wrong_choice_is_named(
    cli: Callable[..., Ended], golden: tuple[str, ...], store: Path, tmp_path: Path
) -> None:
    (tmp_path / "ownports.py").write_text(PORTS)
    tokens = ("inputs=tokens", f"inputs.file={store / 'tokens.json'}")
    made = cli(*golden, *tokens, "name=g")
    assert made.exit == Exit.OK, made.err
    ends = {}
    for port in ("LateTies", "WorstFirst"):
        own = cli(*golden, "kind=candidate", f"port._target_=ownports.{port}", f"name={port}")
        assert own.exit == Exit.OK, own.err
        sides = ("golden=g", f"candidate={port}", f"tracking.folder={store}")
        ends[port] = cli("job=compare", *sides)
    ties = ends["LateTies"]
    assert ties.exit == Exit.OK, ties.out
    assert "all by ties" in ties.out
    assert ends["WorstFirst"].exit == Exit.FAILED
    assert f"FAIL at {CHOICES}" in ends["WorstFirst"].out


def test_what_attention_cannot_see_is_no_choice() -> None:
    # Two tokens after three others, the first row padded on the left, in a cache of eight.
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    call = Call(mask, torch.tensor([[2, 3], [3, 4]]))
    chosen = torch.tensor([[[3, 0, 4, 1, 7, 6], [4, 2, 0, 7, 1, 3]]] * 2, dtype=torch.int32)
    kept = chosen_tokens(chosen, call)
    assert kept.tolist() == [
        [[-1, -1, -1, 1, 3], [-1, 1, 2, 3, 4]],
        [[-1, -1, 0, 1, 3], [0, 1, 2, 3, 4]],
    ]


def test_told_its_own_tokens_a_block_is_the_same_and_told_others_it_shows_its_own(
    tmp_path: Path,
) -> None:
    folder = folders.deepseek_v32(tmp_path / "model", index_topk=3)
    ids, call = padded_batch()
    _, seen = run_all(port_of(folder), ids, call)
    given, block = seen["embed_tokens"].output, seen["layers.0"]
    own = block.tensors["self_attn.indexer:choices"]
    first = torch.where(own < 0, own, own[..., :1].clamp_min(0))

    def replayed(told: torch.Tensor) -> Observed:
        port = port_of(folder)
        port.replay = True
        port.begin(Call(call.attention_mask, call.position_ids, attended={0: told}))
        port.load("layers.0")
        return port.run("layers.0", given)

    same, others = replayed(own), replayed(first)
    assert torch.equal(same.output, block.output)
    assert torch.equal(others.tensors["self_attn.indexer:choices"], own)
    assert not torch.allclose(
        others.tensors["self_attn:context"], block.tensors["self_attn:context"]
    )


class Indexer(nn.Module):
    """The best four of what it is given."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(4, dim=-1).indices


def test_told_choices_are_those_of_one_module_and_a_place_without_one_repeats_another() -> None:
    scores, own, other = torch.rand(1, 2, 6), Indexer(), Indexer()
    told = torch.tensor([[[-1, 2, 5], [0, 1, 3]]])
    replay = Replay(told, None)
    with replay.inside(own):
        assert own(scores).tolist() == [[[5, 2, 5, 5], [0, 1, 3, 3]]]
        assert torch.equal(other(scores), scores.topk(4, dim=-1).indices)
    assert replay.scores is not None and torch.equal(replay.scores, scores)
    assert torch.equal(own(scores), scores.topk(4, dim=-1).indices)


def test_a_choice_that_is_none_ties_with_nothing() -> None:
    values = torch.tensor([[0.9, 0.5, 0.0, 0.0]])
    scores = SiteReference(
        values, Floor(("way",), torch.tensor([[1e-8]]), torch.ones(1, 4)), {}, ISOLATED
    )
    golden, real = torch.tensor([[0, 1]]), torch.ones(1, dtype=torch.bool)
    assert flips(golden, torch.tensor([[-1, 0]]), scores, real)["flips_outside_noise"] == 1
    exact = flips(torch.tensor([[0, 2]]), torch.tensor([[0, 3]]), scores, real)
    assert (exact["flips"], exact["flips_outside_noise"], exact["tie_margin"]) == (1, 0, 0)


class Rounded(Mode):
    """The indexer's scores, as far off as bfloat16 rounds them; or its worst tokens chosen."""

    def __init__(self, sign: int = 1) -> None:
        super().__init__()
        self.sign = sign

    def run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **named)
        scores, maker = args[0].float(), torch.Generator().manual_seed(0)
        size = scores[scores > -1e30].square().mean().sqrt() / 512
        noise = size * torch.randn(scores.shape, generator=maker)
        found = self.sign * (scores + noise)
        return func(found.where(scores > -1e30, scores).to(args[0].dtype), *args[1:], **named)


# Of what is recorded as components, all but which tokens attention chose.
WITHOUT = (
    "model.layers.?",
    "*.self_attn",
    "*.o_proj",
    "*norm",
    "*.mlp",
    "lm_head",
    "*.embed_tokens",
)


@pytest.mark.usefixtures("no_mistakes_tried")
def test_wrong_tokens_that_a_recording_shows_are_named(
    cli: Callable[..., Ended], store: Path, tmp_path: Path
) -> None:
    model = folders.deepseek_v32(tmp_path / "model", index_n_heads=8)
    with Rounded(sign=-1):
        recorded(engine(model, torch.bfloat16), tmp_path / "dump", steps=0)
    own = ("job=compare", "job.own_inputs=true", f"candidate={tmp_path / 'dump'}")
    of = ("model=checkpoint", f"model.path={model}", "device_map=cpu")
    ended = cli(f"tracking.folder={store}", *own, *of)
    assert ended.exit == Exit.FAILED
    assert f"FAIL at {CHOICES}" in ended.out


@pytest.mark.parametrize("times", [1.0, 1.03])
@pytest.mark.parametrize("shown", [True, False], ids=["shown", "not shown"])
@pytest.mark.usefixtures("no_mistakes_tried")
def test_chosen_tokens_are_replayed_and_without_them_ties_alone_are_excused(
    cli: Callable[..., Ended], store: Path, tmp_path: Path, times: float, shown: bool
) -> None:
    """Sixteen channels of a head's values, and eight that positions rotate."""
    model = folders.deepseek_v32(tmp_path / "model", index_n_heads=8)
    running = engine(model, torch.bfloat16)
    core = running.get_submodule("model.layers.0.self_attn.o_proj")
    core.register_forward_pre_hook(lambda module, given: (given[0] * times,))
    with Rounded():
        recorded(running, tmp_path / "dump", steps=0, sites="components" if shown else WITHOUT)
    own = ("job=compare", "job.own_inputs=true", f"candidate={tmp_path / 'dump'}")
    of = ("model=checkpoint", f"model.path={model}", "device_map=cpu")
    ended = cli(f"tracking.folder={store}", *own, *of)
    assert "layers.0.self_attn:context is left out" not in ended.out
    if times == 1.0:
        assert ended.exit == Exit.OK, ended.out + ended.err
        words = " ".join(ended.out.split())
        assert ("left out: the candidate shows no choices" in words) is not shown
    else:
        assert ended.exit == Exit.FAILED
        assert "FAIL at layers.0.self_attn:context" in ended.out
