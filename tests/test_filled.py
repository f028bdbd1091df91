"""What is known of weights from the one time they are read, whatever type they have."""

from __future__ import annotations

import json
from pathlib import Path

import folders
import pytest
import torch
from fp8_small import fp8_copy
from safetensors.torch import load_file, save_file
from test_weights import STAGES, port_of

from layerparity.model.checkpoint import Checkpoint
from layerparity.model.prints import against, print_of
from layerparity.model.reading import Files
from layerparity.model.tensor_hashes import values_digest
from layerparity.settings.config import DType

STORED = ["float32", "float16", "bfloat16", "fp8"]
HELD = [DType.float32, DType.float16, DType.bfloat16]


@pytest.fixture(scope="module", params=STORED)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folders.minimax_m2(tmp_path_factory.mktemp(request.param) / "wide")
    if request.param == "fp8":
        return fp8_copy(folder, folder.parent / "fp8")
    dtype = getattr(torch, request.param)
    (file,) = folder.glob("*.safetensors")
    # The folder's own values are bfloat16 numbers.
    held = {name: (each.float() * 1.01).to(dtype) for name, each in load_file(file).items()}
    # Numbers that bfloat16 can hold, stored in whatever type: their hash is that of bfloat16.
    held["model.norm.weight"] = torch.full_like(held["model.norm.weight"], 0.5)
    save_file(held, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", HELD)
def test_prints_are_those_of_a_second_reading_that_is_not_made(
    stored: Path, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    sound = Files.read

    def counted(files: Files, file: Path, begin: int, into: memoryview) -> None:
        read.append(len(into))
        sound(files, file, begin, into)

    port = port_of(stored, dtype)
    checkpoint = port.assets.checkpoint
    made, held = {}, {}
    with monkeypatch.context() as patched:
        patched.setattr(Files, "read", counted)
        patched.setattr(Checkpoint, "value", None)
        for stage in STAGES:
            port.load(stage)
            made |= port.effective_weights(stage)
            for name, tensor in port.skeleton.module(stage).state_dict().items():
                place = f"{port.skeleton.path(stage)}.{name}"
                held |= port.skeleton.as_stored(checkpoint, place, tensor)
    assert sum(read) == sum(each.bytes for each in checkpoint.tensors.values())
    assert made.keys() == held.keys() == checkpoint.tensors.keys()
    again = against(checkpoint, {name: print_of(tensor) for name, tensor in held.items()})
    for name, each in made.items():
        slow = again[name]
        assert (each.digest, each.dtype) == (slow.digest, slow.dtype), name
        assert (each.checkpoint, each.stored) == (slow.checkpoint, slow.stored), name
    rounded = {name for name, each in made.items() if each.checkpoint == "rounded"}
    assert "model.norm.weight" not in rounded
    if (stored.parent.name[:7], dtype) == ("float32", DType.bfloat16):
        assert "model.layers.1.self_attn.q_proj.weight" in rounded


def test_a_value_that_is_not_what_was_read_is_found(stored: Path) -> None:
    port = port_of(stored, DType.bfloat16)
    port.load("layers.1")
    with torch.no_grad():
        port.skeleton.module("layers.1").mlp.experts.down_proj.mul_(2)
    made = port.effective_weights("layers.1")
    wrong = {name for name, each in made.items() if each.checkpoint == "differs"}
    assert wrong and all(name.endswith("w2.weight") for name in wrong)


def test_values_are_hashed_in_the_narrowest_type_that_holds_them_all() -> None:
    narrow = torch.arange(8).bfloat16()
    assert values_digest(narrow) == values_digest(narrow.float()) == values_digest(narrow.half())
    late = torch.zeros((1 << 20) + 1)
    early = values_digest(late)
    late[-1] = 1 / 3
    assert values_digest(late) != early == values_digest(late[:-1].new_zeros((1 << 20) + 1))


def test_a_file_that_changes_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    from layerparity.ground.errors import UserError

    folder = folders.minimax_m2(tmp_path / "model")
    port = port_of(folder)
    port.place(STAGES)
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    turned = {name: held[name] for name in sorted(held, reverse=True)}
    save_file(turned, file, metadata={"format": "pt", "again": json.dumps(sorted(held))})
    with pytest.raises(UserError, match="changed while it was being used"):
        port.load("layers.1")
