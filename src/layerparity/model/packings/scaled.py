"""Eight-bit numbers, each stored by itself, with a scale by weight, row, group or block.

FP8 is e4m3: in blocks of 128 x 128 DeepSeek's and MiniMax's, by row Llama's and
compressed-tensors', by weight ModelOpt's and Mistral's. ``weight_scale_inv`` is multiplied by, as
all scales are. INT8 is compressed-tensors', whole numbers from -128 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, SCALES, ZEROS, MadeOfPieces, Matrix, widened
from layerparity.model.packing_format import (
    SCALE_TYPES,
    Format,
    Laid,
    Quantization,
    Shape,
    UnfitError,
    check_part,
)
from layerparity.numbers.pieces import Pieces

if TYPE_CHECKING:
    import torch

USUAL_BLOCK = (128, 128)
Block = tuple[int, int]


@dataclass(frozen=True)
class Scaled(MadeOfPieces):
    """A layout of numbers that share a scale in blocks of so many rows and columns."""

    block: Block
    turned: bool = False
    by_rows: bool = True

    @property
    def step(self) -> int:
        """Rows between two places where the weight can be cut."""
        return self.block[0]

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""
        numbers = widened(matrix.rows(NUMBERS, first, count))
        scales = self._lines(matrix, SCALES, first, count)
        zeros = self._lines(matrix, ZEROS, first, count) if matrix.has(ZEROS) else None
        return Pieces(numbers, scales, self.block[1], zeros, height=self.block[0])

    def _lines(self, matrix: Matrix, role: str, first: int, count: int) -> torch.Tensor:
        """Return scales or zero points of some rows, float32 [row or 1, group]."""
        groups = -(-matrix.weight.shape[-1] // self.block[1])
        lines, step = matrix.whole(role).float().reshape(-1, groups), self.block[0]
        if len(lines) == 1:
            return lines
        own = lines[first // step : -(-(first + count) // step)]
        return own if step == 1 or len(own) == 1 else own.repeat_interleave(step, 0)[:count]


def lay(parts: Mapping[str, Stored], settings: Quantization) -> Laid:
    """Return how a weight lies, which the shape of its scales says. Raises UnfitError."""
    numbers, scales = parts[NUMBERS], parts[SCALES]
    if len(numbers.shape) < 2:
        text = f"{numbers.name} has one axis: it has no blocks"
        raise UnfitError("scale_shape", text, numbers)
    block = block_of(settings)
    *lead, rows, columns = numbers.shape
    due = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    # What config.json says holds; a scale by weight or by row it says nothing of.
    strict = settings.keys.get("weight_block_size") is not None
    by_shape = None if strict else _by_shape(numbers.shape, scales.shape)
    found = block if scales.shape == due else by_shape
    if found is None:
        text = (
            f"{scales.name} has the shape {list(scales.shape)}, and {list(numbers.shape)} in "
            f"blocks of {list(block)} wants {list(due)}"
        )
        raise UnfitError("scale_shape", text, scales)
    if scales.dtype not in SCALE_TYPES:
        raise UnfitError("scale_type", f"{scales.name} is stored as {scales.dtype}", scales)
    check_part(parts, ZEROS, scales.shape, "I8", "I32", *SCALE_TYPES)
    kind = "INT8" if numbers.dtype == "I8" else numbers.dtype
    return Laid(kind, numbers.shape, Scaled(found))


def block_of(settings: Quantization) -> Block:
    """Return rows and columns of a block, as config.json says them; the usual ones otherwise.

    Raises UserError for what is no block.
    """
    block = settings.keys.get("weight_block_size")
    for said in settings.weights():
        block = block or said.get("block_structure")
    if block is None:
        return USUAL_BLOCK
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(
            f"config.json's quantization_config has weight_block_size={block}",
            "blocks have two dimensions; convert the checkpoint to bfloat16 first.",
        )
    return sizes[0], sizes[1]


def _by_shape(shape: Shape, scales: Shape) -> Block | None:
    """Return the block of scales by weight, by row or by group of a row; None for another shape."""
    *lead, rows, columns = shape
    # One for each matrix, with or without axes of one.
    bare = tuple(size for size in scales if size != 1)
    if bare in ((), tuple(size for size in lead if size != 1)):
        return rows, columns
    if scales in ((*lead, rows), (*lead, rows, 1)):
        return 1, columns
    if scales[:-1] == (*lead, rows) and scales[-1] and columns % scales[-1] == 0:
        return 1, columns // scales[-1]
    return None


FORMAT = Format(
    dtypes=("F8_E4M3", "I8"),
    parts={SCALES: ("_scale_inv", "_scale"), ZEROS: ("_zero_point",)},
    needed=(SCALES,),
    lay=lay,
    methods=("", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "quark"),
)
