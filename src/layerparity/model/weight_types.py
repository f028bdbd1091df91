"""Say in which type a weight is stored and held: FP8 with its scales, and what stays float32.

FP8 weights are e4m3 numbers with one scale for each block of 128 x 128.
The scale of ``x.weight`` is stored as ``x.weight_scale_inv``; a value is the stored number times
its block's scale. Blocks at the lower and right edge may be smaller than the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SCALE = "weight_scale_inv"
STORED = ("F8_E4M3",)
SCALES = ("F32", "BF16", "F16")
_WEIGHT = "weight"
USUAL_BLOCK = (128, 128)
_FLOATING = ("float64", "float32", "bfloat16", "float16")


def own_type(config: Mapping[str, object]) -> str:
    """Return torch's name of the floating type that a checkpoint is of, from config.json's values.

    One that says none was written before there was another than float32, or holds FP8.
    """
    said = str(config.get("dtype") or config.get("torch_dtype"))
    if said in _FLOATING:
        return said
    return "float32" if config.get("quantization_config") is None else "bfloat16"


def scale_name(name: str) -> str:
    """Return the name of a weight's scales: ``x.weight_scale_inv`` for ``x.weight``."""
    return f"{name.removesuffix(_WEIGHT)}{SCALE}"


def weight_name(scale: str) -> str:
    """Return the name of the weight that scales belong to."""
    return f"{scale.removesuffix(SCALE)}{_WEIGHT}"


def is_scale(name: str) -> bool:
    """Say whether a stored name is that of scales."""
    return name.endswith(f".{SCALE}")


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns of a block, from config.json's values.

    Raises UserError for a quantization that is no FP8 with scales by block.
    """
    said = config.get("quantization_config")
    if said is None:
        return USUAL_BLOCK
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if method != "fp8":
        raise UserError(
            f"config.json says that the weights are quantised by {method}, which is not read",
            "give the checkpoint that it was quantised from; plain floating point and fp8 in "
            "blocks are read.",
        )
    block = said.get("weight_block_size", USUAL_BLOCK) if isinstance(said, Mapping) else None
    sizes = block if isinstance(block, list | tuple) else ()
    whole = all(type(size) is int and size > 0 for size in sizes)
    if len(sizes) != 2 or not whole:
        raise UserError(
            f"config.json's quantization_config is fp8 with weight_block_size={block}",
            "fp8 is read with blocks of two dimensions; convert the checkpoint to bfloat16 first.",
        )
    return sizes[0], sizes[1]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of ``shape``, whose last two axes have blocks."""
    *before, rows, columns = shape
    return (*before, -(-rows // block[0]), -(-columns // block[1]))


def dequantised(rows: torch.Tensor, factors: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the float32 values of FP8 rows [row, column] that share one row of blocks.

    ``factors`` [block] are the scales of the blocks, each ``columns`` wide. The product is made in
    float32, as transformers' own operation makes it.
    """
    import torch

    wide = factors.to(torch.float32).repeat_interleave(columns)[: rows.shape[1]]
    # All 256 numbers looked up take half the time of one cast after the other.
    places = rows.view(torch.uint8).flatten().to(torch.int32)
    return _numbers().index_select(0, places).view(rows.shape).mul_(wide)


@cache
def _numbers() -> torch.Tensor:
    """Return the float32 value of every e4m3 number, by its bits."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def patterns_of(
    model: PreTrainedModel, dtype: torch.dtype, family: Iterable[str]
) -> tuple[str, ...]:
    """Return the family's own patterns, and what transformers' class keeps in float32 in a run."""
    return (*family, *(f"*{name}*" for name in model._get_dtype_plan(dtype)))


def stays_float32(name: str, patterns: Iterable[str]) -> bool:
    """Say whether a weight, by its whole name, is one of the patterns.

    The dot before it lets ``*.lm_head.*`` mean a module wherever it stands, the root too.
    """
    return any(fnmatchcase(f".{name}", pattern) for pattern in patterns)
