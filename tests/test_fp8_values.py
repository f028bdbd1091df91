"""FP8 values: each number times the scale of its own block, of its own matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from layerparity.model.filling import Filler
from layerparity.model.header import read_header
from layerparity.model.reading import Files
from layerparity.model.weight_types import dequantised, scale_shape

BLOCK = (2, 3)


def test_a_scale_serves_the_columns_of_its_block() -> None:
    rows = torch.ones(2, 7).to(torch.float8_e4m3fn)
    found = dequantised(rows, torch.tensor([2.0, 4.0, 8.0]), BLOCK[1])
    assert found.tolist() == [[2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]] * 2


def test_the_last_blocks_of_a_weight_may_be_smaller() -> None:
    assert scale_shape((5, 5, 7), BLOCK) == (5, 3, 3)
    assert scale_shape((4, 6), BLOCK) == (2, 2)


def test_each_matrix_of_a_stack_has_scales_of_its_own(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 5, 7, generator=made).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, 3, generator=made) + 0.5
    file = tmp_path / "model.safetensors"
    save_file({"x.weight": weight, "x.weight_scale_inv": scales}, file)
    stored = {each.name: each for each in read_header(file).tensors}
    into = torch.empty(2, 5, 7)
    Filler(Files({}), hashing=False).fill_fp8(
        stored["x.weight"], stored["x.weight_scale_inv"], BLOCK, into, torch.bfloat16
    )
    wide = scales.repeat_interleave(2, 1)[:, :5].repeat_interleave(3, 2)[:, :, :7]
    assert torch.equal(into, weight.float() * wide)
