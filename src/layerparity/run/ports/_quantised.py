"""Find a loaded stage's FP8 weights as they are stored, with where each was put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.ground.files import read_tensor
from layerparity.mistakes.fault import Quantised
from layerparity.model import weight_types

if TYPE_CHECKING:
    import torch

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.skeleton import Skeleton


def holds_fp8(checkpoint: Checkpoint) -> bool:
    """Say whether any weight of a checkpoint is stored in FP8."""
    return any(each.dtype in weight_types.STORED for each in checkpoint.weights.values())


def quantised(skeleton: Skeleton, checkpoint: Checkpoint, stage: str) -> Iterator[Quantised]:
    """Yield the FP8 weights of a stage whose modules are filled, on the CPU."""
    path = skeleton.path(stage)
    for name, held in skeleton.module(stage).named_parameters():
        pieces = skeleton.as_stored(checkpoint, f"{path}.{name}", held.data)
        for stored, value in pieces.items():
            scales = checkpoint.scales(stored)
            if scales is not None:
                numbers = read_tensor(checkpoint.tensors[stored].file, stored).float()
                factors = read_tensor(scales.file, scales.name).float()
                yield Quantised(value, numbers, _spread(factors, checkpoint.block, numbers.shape))


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Return each number's own scale, of blocks that may be cut off at the edges."""
    wide = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]
