"""Where each element of a checkpoint goes is found out by running the converter on numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from layerparity.model.checkpoint import Checkpoint
from layerparity.model.element_origins import inverse, trace
from layerparity.ports.nxdi.configuration import Described, narrow
from layerparity.ports.ranks.stage_weights import Renaming, StageForm, Traces

State = dict[str, torch.Tensor]
Convert = Callable[[State], State]
# A number of layers under an architecture's own name.
LAYERS = {"n_layer": "num_hidden_layers"}


def stored(dtype: torch.dtype = torch.float32) -> State:
    """Return three matrices and a norm's weight; no two elements are equal."""
    maker = torch.Generator().manual_seed(3)
    shapes = {"q": (24, 40), "k": (8, 40), "up": (16, 40), "norm": (40,)}
    return {n: torch.randn(shape, generator=maker).to(dtype) for n, shape in shapes.items()}


def renames(state: State) -> State:
    return {f"layer.{name}": value for name, value in state.items()}


def stacks(state: State) -> State:
    return {"both": torch.stack([state["q"][:16].T, state["up"].T]), "rest": state["q"][16:]}


def fuses(state: State) -> State:
    return {"qk": torch.cat([state["q"], state["k"]]), "norm": state["norm"]}


def pads(state: State) -> State:
    return {"q": torch.nn.functional.pad(state["q"], (0, 3, 2, 5))}


def replicates(state: State) -> State:
    return {"k": state["k"].unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1)}


def transposes(state: State) -> State:
    return {"q": state["q"].T.contiguous(), "k": state["k"].flip(1)}


def casts(state: State) -> State:
    return {name: value.to(torch.bfloat16) for name, value in state.items()}


def slices(state: State) -> State:
    return {"q": state["q"].chunk(4)[2], "up": state["up"].chunk(4, 1)[1]}


def in_place(state: State) -> State:
    """Permute the tensor that was given."""
    state["q"].copy_(state["q"].flip(0).clone())
    return {"q": state["q"]}


def roundtrip(convert: Convert, values: State) -> dict[str, torch.Tensor]:
    """Return which elements of each stored tensor came back; all that did must be right."""
    origins = trace(convert, values)
    parameters = convert({name: value.clone() for name, value in values.items()})
    found = inverse(origins, parameters, {name: value.shape for name, value in values.items()})
    for name, got in found.items():
        assert not got.doubled
        due = values[name].to(got.values.dtype)
        assert torch.equal(got.values[got.mask], due[got.mask]), name
    return {name: got.mask for name, got in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("convert", "whole"),
    [
        (renames, {"q", "k", "up", "norm"}),
        (stacks, {"q", "up"}),
        (fuses, {"q", "k", "norm"}),
        (pads, {"q"}),
        (replicates, {"k"}),
        (transposes, {"q", "k"}),
        (casts, {"q", "k", "up", "norm"}),
        (in_place, {"q"}),
    ],
)
def test_the_inverse_gives_back_what_was_converted(
    convert: Convert, whole: set[str], dtype: torch.dtype
) -> None:
    masks = roundtrip(convert, stored(dtype))
    assert set(masks) == whole
    assert all(bool(mask.all()) for mask in masks.values())


def test_a_slice_gives_back_its_part_alone() -> None:
    masks = roundtrip(slices, stored())
    assert masks["q"].any(1).nonzero().flatten().tolist() == [12, 13, 14, 15, 16, 17]
    assert masks["up"].any(0).nonzero().flatten().tolist() == [*range(10, 20)]


@pytest.mark.parametrize(
    "convert",
    [
        lambda state: {"norm": state["norm"] + 1, "q": state["q"]},
        lambda state: {"norm": torch.full((40,), 5.0), "q": state["q"]},
        lambda state: {"norm": torch.arange(40.0) + 1, "q": state["q"]},
        lambda state: {"norm": state["k"].mean(0), "q": state["q"]},
        lambda state: {"norm": state["up"].sum(0) * 0 + 1, "q": state["q"]},
    ],
)
def test_what_was_computed_or_made_up_comes_from_nowhere(convert: Convert) -> None:
    origins = trace(convert, stored())
    assert origins["norm"].stored == []
    assert bool((origins["norm"].place < 0).all())
    assert origins["q"].stored == ["q"]


def test_numbers_have_as_many_digits_as_there_are_elements() -> None:
    """Three digits of 128; padding with zeros is none of them."""
    values = {"a": torch.randn(128, 130), "b": torch.randn(900)}
    origins = trace(lambda state: {"ab": torch.cat([state["a"].flatten(), state["b"]])}, values)
    assert torch.equal(origins["ab"].place[:16640], torch.arange(16640, dtype=torch.int32))
    assert torch.equal(origins["ab"].place[16640:], torch.arange(900, dtype=torch.int32))


def test_places_that_hold_one_element_and_differ_are_told() -> None:
    values = stored()
    origins = trace(replicates, values)
    parameters = replicates(values)
    parameters["k"] = parameters["k"].clone()
    parameters["k"][0] += 1
    shapes = {name: value.shape for name, value in values.items()}
    assert inverse(origins, parameters, shapes)["k"].doubled


class Config:
    """A configuration, as far as traces ask."""

    def __init__(self, heads: int) -> None:
        self.heads = heads


def test_a_trace_serves_further_blocks_of_its_form_and_no_other(tmp_path: Path) -> None:
    """It is asked of the values, too: a converter may treat a block by what it holds."""
    traces, first = Traces(), {f"model.layers.0.{n}": each for n, each in stored().items()}
    second = {f"model.layers.1.{n}": each * 2 for n, each in stored().items()}

    def convert(state: State) -> State:
        return {name.rpartition(".")[2]: value for name, value in state.items()}

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({**first, **second}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    form = StageForm.of(first, Renaming("layers.0", "model.", ""), [], Config(4))
    assert traces.of(form, convert(first), checkpoint, first) is None
    traces.kept(form, convert(first), trace(convert, first))
    alike = StageForm.of(second, Renaming("layers.1", "model.", ""), [], Config(4))
    again = traces.of(alike, convert(second), checkpoint, second)
    assert again is not None
    assert again["q"].stored == ["model.layers.1.q"]
    more = StageForm.of(second, Renaming("layers.1", "model.", ""), [], Config(8))
    assert traces.of(more, convert(second), checkpoint, second) is None
    other = {name: value + 1 for name, value in convert(second).items()}
    assert traces.of(alike, other, checkpoint, second) is None


def test_a_configuration_of_one_block_lists_what_is_that_blocks() -> None:
    values = {
        "layer_types": ["sliding", "full", "full"],
        "layer_uses_moe": [False, True, True],
        "moe_layer_freq": [0, 1, 1],
        "mlp_only_layers": [0, 2],
        "moe_layers": [1, 5, 7],
        "first_k_dense_replace": 2,
        "eos_token_id": [1, 2, 3],
        "rope_layers": [0, 1],
    }
    model = Described({}, {**values, "num_hidden_layers": 3, "n_layer": 3}, LAYERS, ())
    assert model.blocks(1, 1, tokens=4) == {
        "layer_types": ["full"],
        "layer_uses_moe": [True],
        "moe_layer_freq": [1],
        "mlp_only_layers": [],
        "moe_layers": [0],
        "first_k_dense_replace": 1,
        "eos_token_id": [1, 2, 3],
        "rope_layers": [0, 1],
        "num_hidden_layers": 1,
        "n_layer": 1,
    }
    assert model.blocks(0, 3, tokens=4) == model.values


@pytest.mark.parametrize(
    ("said", "window", "given"),
    [
        ({"sliding_window": 9}, 9, 4),
        ({"sliding_window": 3}, 3, 3),
        ({"sliding_window": None}, 0, None),
        ({"sliding_window": 9, "use_sliding_window": False}, 0, 9),
    ],
)
def test_a_window_is_cut_to_what_there_is_to_see(
    said: dict[str, Any], window: int, given: int | None
) -> None:
    model = Described({}, {"num_hidden_layers": 2, **said}, LAYERS, ())
    assert model.window == window
    assert model.blocks(0, 1, tokens=4)["sliding_window"] == given


def test_lists_that_a_configuration_made_itself_are_cut_too() -> None:
    config = SimpleNamespace(updated_layers=[4, 5, 6], others=[4, 5, 6], layer_types=["full"])
    narrow(config, 1, of=3)
    assert vars(config) == {"updated_layers": [5], "others": [4, 5, 6], "layer_types": ["full"]}
