"""How tensors of a dump lie: heads, and what the final norm makes of the last block's output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from layerparity.anatomy.family import HEADS, HIDDEN
from layerparity.making.dump_layout import DumpLayout
from layerparity.making.misplaced import is_normed

BATCH, TOKENS, HEADS_OF, WIDTH = 2, 5, 3, 4
VALUES = torch.arange(BATCH * TOKENS * HEADS_OF * WIDTH).view(BATCH, TOKENS, HEADS_OF, WIDTH)


@pytest.mark.parametrize("spec", [HIDDEN, HEADS])
@pytest.mark.parametrize(
    ("batch", "dumped"),
    [
        (BATCH, lambda value: value),
        (BATCH, lambda value: value.transpose(1, 2)),
        (BATCH, lambda value: value.flatten(0, 1)),
        (1, lambda value: value[0]),
        (1, lambda value: value.transpose(1, 2)),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_heads_are_seen(
    spec: object, batch: int, dumped: Callable[[torch.Tensor], torch.Tensor], step: int
) -> None:
    """A norm per head shows them, whatever its site is taken for; so may attention."""
    value = VALUES[:batch, :1] if step else VALUES[:batch]
    layout = DumpLayout(torch.ones(batch, TOKENS, dtype=torch.int64), WIDTH)
    axes = layout.with_heads(spec, dumped(value), step)
    laid = layout.laid_out(dumped(value), axes, step)
    assert axes == HEADS
    assert isinstance(laid, torch.Tensor), laid
    assert laid.equal(value)


def test_channels_that_are_no_heads_stay_channels() -> None:
    """One key head has as many channels as a head; so has a block's output by chance."""
    layout = DumpLayout(torch.ones(BATCH, TOKENS, dtype=torch.int64), WIDTH)
    single = VALUES[:, :, 0]
    for step, value in ((0, single), (1, single[:, :1])):
        assert layout.with_heads(HIDDEN, value, step) == HIDDEN
        laid = layout.laid_out(value, HIDDEN, step)
        assert isinstance(laid, torch.Tensor)
        assert laid.equal(value)
    wide = VALUES.flatten(2)
    assert layout.with_heads(HIDDEN, wide, 0) == HIDDEN
    laid = layout.laid_out(wide, HEADS, 0)
    assert isinstance(laid, torch.Tensor)
    assert laid.equal(VALUES)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_behind_the_final_norm_is_known_by_it(
    kind: Callable[[int], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = kind(64)
    for each in norm.parameters():
        nn.init.normal_(each, 0.5, 0.5)
    block = torch.randn(1, 12, 64) * torch.rand(12, 1) + 0.3
    with torch.no_grad():
        normed = norm(block).to(dtype)
    normed[0, 0] = 0
    assert is_normed(normed, norm)
    assert not is_normed(block.to(dtype), norm)
    assert not is_normed(normed * 1.05, norm)
    assert not is_normed(torch.tensor(1.0), norm)
    # Even of rows that all have one size.
    unit = block / block.square().mean(-1, keepdim=True).sqrt()
    assert not is_normed(unit, norm)
    assert not is_normed(normed[..., :32], norm)
    assert not is_normed(torch.zeros(1, 12, 64), norm)
