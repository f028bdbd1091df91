"""mlx-lm, really run on the shipped MiniMax-M2; three lines record it.

In float32: on the CPU mlx multiplies experts' matrices in no other type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn
import pytest
import torch
from conftest import ROOT, Ended
from mlx_lm.utils import load_model
from real_engines import judged

from layerparity.record.verdict import Outcome
from layerparity.recording_mlx import recording

Cli = Callable[..., Ended]
TINY = ROOT / "checkpoints/tiny_minimax_m2"
# By these tokens every expert of every block is chosen.
IDS = torch.randint(3, 500, (1, 96), generator=torch.Generator().manual_seed(1))


def _bias_zeroed(blocks: list[mlx.nn.Module]) -> None:
    bias = blocks[2].block_sparse_moe.e_score_correction_bias
    blocks[2].block_sparse_moe.e_score_correction_bias = mx.zeros_like(bias)


def _all_rotated(blocks: list[mlx.nn.Module]) -> None:
    for block in blocks:
        block.self_attn.rope.dims *= 2


def _v_scaled(blocks: list[mlx.nn.Module]) -> None:
    blocks[1].self_attn.v_proj.weight = blocks[1].self_attn.v_proj.weight * 1.03


def _experts_scaled(blocks: list[mlx.nn.Module]) -> None:
    down = blocks[3].block_sparse_moe.switch_mlp.down_proj
    down.weight = down.weight * 1.05


FAULTS = {
    "a router's bias is zeros": (_bias_zeroed, "layers.2.mlp"),
    "all dimensions are rotated": (_all_rotated, "layers.0.self_attn"),
    "V of block 1 is 3 % too large": (_v_scaled, "layers.1.self_attn"),
    "experts of block 3 are 5 % too large": (_experts_scaled, "layers.3.mlp"),
}


def recorded(folder: Path, wrong: Callable[[list[mlx.nn.Module]], None] | None = None) -> Path:
    """Record one prefill of mlx-lm's model, and return where."""
    model, _ = load_model(TINY)
    model.set_dtype(mx.float32)
    if wrong is not None:
        wrong(model.layers)
    with recording(model, to=folder):
        mx.eval(model(mx.array(IDS.tolist())))
    return folder


def test_a_right_one_passes(cli: Cli, tmp_path: Path) -> None:
    before = mlx.nn.Linear.__call__
    folder = recorded(tmp_path / "folder")
    assert mlx.nn.Linear.__call__ is before
    verdict, said = judged(cli, folder, "model=checkpoint", f"model.path={TINY}")
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.whole.outcome is Outcome.PASS, said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(cli: Cli, tmp_path: Path, fault: str) -> None:
    wrong, where = FAULTS[fault]
    folder = recorded(tmp_path / "folder", wrong)
    verdict, said = judged(cli, folder, "model=checkpoint", f"model.path={TINY}")
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith(where), said
