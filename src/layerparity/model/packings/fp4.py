"""Numbers of four bits, e2m1, two to a byte, with a scale for each few of a row.

NVFP4 has an e4m3 scale for 16 numbers and one for the whole weight, which ModelOpt multiplies by
and compressed-tensors divides by. MXFP4 has an e8m0 scale for 32, an exponent alone. gpt-oss
publishes it as ``x_blocks`` and ``x_scales`` [expert, out, in], and transformers holds the weight
[expert, in, out].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.model.header import Stored
from layerparity.model.packed import (
    NUMBERS,
    OVERALL,
    SCALES,
    MadeOfPieces,
    Matrix,
    nibbles,
    widened,
)
from layerparity.model.packing_format import Format, Laid, Quantization, UnfitError
from layerparity.numbers.pieces import Pieces

if TYPE_CHECKING:
    import torch

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-each for each in _POSITIVE))
# Of e8m0: OCP Microscaling Formats (MX) Specification 1.0, 5.4.1; 255 is no number.
BIAS = 127
# By the type of the scales: the format's name, and how many numbers share one.
_KINDS = {"F8_E4M3": ("NVFP4", 16), "U8": ("MXFP4", 32), "F8_E8M0": ("MXFP4", 32)}
_BLOCKS, _DIVIDED = "_blocks", "_global_scale"


@dataclass(frozen=True)
class Fp4(MadeOfPieces):
    """A layout of e2m1 numbers in groups; the overall scale is divided by where it ``divides``."""

    group: int
    divides: bool
    turned: bool
    step: int = 1

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be read without the others."""
        return not self.turned

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""
        numbers = nibbles(matrix.rows(NUMBERS, first, count).reshape(count, -1), E2M1)
        scales, overall = _factors(matrix.rows(SCALES, first, count)), 1.0
        if matrix.has(OVERALL):
            held = matrix.whole(OVERALL).float().reshape(())
            scales = scales / held if self.divides else scales * held
            overall = 1 / float(held) if self.divides else float(held)
        return Pieces(numbers, scales, self.group, overall=overall)


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of any shape in float32."""
    import torch

    if scales.dtype == torch.float8_e4m3fn:
        return widened(scales)
    return torch.exp2(scales.float() - BIAS).masked_fill_(scales == 2 * BIAS + 1, torch.nan)


def lay(parts: Mapping[str, Stored], settings: Quantization) -> Laid:
    """Return how a weight lies. Raises UnfitError where a group of numbers lacks its scale."""
    numbers, scales = parts[NUMBERS], parts[SCALES]
    if scales.dtype not in _KINDS:
        raise UnfitError("scale_type", f"{scales.name} is stored as {scales.dtype}", scales)
    kind, group = _KINDS[scales.dtype]
    if kind == "NVFP4" and OVERALL not in parts:
        text = f"{numbers.name} is NVFP4 without a scale of the whole weight"
        raise UnfitError("scale_missing", text, numbers)
    turned = numbers.name.endswith(_BLOCKS)
    # gpt-oss has an axis for the groups: [expert, out, group, byte].
    bytes_of_row = math.prod(numbers.shape[-2:] if turned else numbers.shape[-1:])
    lead, columns = numbers.shape[: -2 if turned else -1], 2 * bytes_of_row
    if not lead or scales.shape != (*lead, columns // group) or columns % group:
        text = (
            f"{scales.name} has the shape {list(scales.shape)}, and the numbers of "
            f"{numbers.name}, {list(numbers.shape)}, want one scale for each {group}"
        )
        raise UnfitError("scale_shape", text, scales)
    *stack, rows = lead
    shape = (*stack, columns, rows) if turned else (*stack, rows, columns)
    divides = OVERALL in parts and parts[OVERALL].name.endswith(_DIVIDED)
    return Laid(kind, shape, Fp4(group, divides, turned))


FORMAT = Format(
    dtypes=("U8",),
    suffixes=("_packed", _BLOCKS, ""),
    parts={SCALES: ("_scale", "_scales"), OVERALL: (_DIVIDED, "_scale_2")},
    needed=(SCALES,),
    lay=lay,
    methods=("mxfp4", "compressed-tensors", "modelopt", "quark"),
)
