"""FP8 values: each number times the scale of its own block, of its own matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layerparity.model.checkpoint import Checkpoint

MADE = torch.Generator()


@pytest.fixture(autouse=True)
def _as_if_alone() -> None:
    MADE.manual_seed(0)


def checkpoint(folder: Path, weight: torch.Tensor, scales: torch.Tensor) -> Checkpoint:
    """Return a checkpoint of one weight in FP8 with these scales, in blocks of two by three."""
    said = {"quant_method": "fp8", "weight_block_size": [2, 3] if scales.dim() > 1 else None}
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    held = {"x.weight": weight.to(torch.float8_e4m3fn), "x.weight_scale_inv": scales}
    save_file(held, folder / "model.safetensors")
    return Checkpoint(folder)


def test_a_scale_serves_the_columns_of_its_block(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, torch.ones(2, 7), torch.tensor([[2.0, 4.0, 8.0]]))
    assert found.value("x.weight").tolist() == [[2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]] * 2


def test_each_matrix_of_a_stack_has_scales_of_its_own(tmp_path: Path) -> None:
    weight = torch.randn(2, 5, 7, generator=MADE)
    scales = torch.rand(2, 3, 3, generator=MADE) + 0.5
    found = checkpoint(tmp_path, weight, scales)
    wide = scales.repeat_interleave(2, 1)[:, :5].repeat_interleave(3, 2)[:, :, :7]
    right = weight.to(torch.float8_e4m3fn).float() * wide
    assert torch.equal(found.value("x.weight", torch.float32), right)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_a_scale_may_be_of_a_row_or_of_the_whole_weight(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    weight, scales = torch.randn(5, 7, generator=MADE), torch.rand(shape, generator=MADE) + 0.5
    found = checkpoint(tmp_path, weight, scales)
    wide = scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(())
    right = weight.to(torch.float8_e4m3fn).float() * wide
    assert torch.equal(found.value("x.weight", torch.float32), right)
