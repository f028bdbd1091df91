"""GPTQ: words of 32 bits along the inputs, zero points along the outputs, maybe an act-order.

``qweight`` [in / 8, out], ``qzeros`` [group, out / 8], ``scales`` [group, out] and ``g_idx`` [in],
the group of each input. Of the first version of the format a zero point is stored less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, ORDER, SCALES, ZEROS, MadeOfPieces, Matrix, unsigned
from layerparity.model.packing_format import (
    SCALE_TYPES,
    Format,
    Laid,
    Quantization,
    UnfitError,
    check_part,
    refuse_uneven,
)
from layerparity.numbers.pieces import Pieces

_WORD = 32


@dataclass(frozen=True)
class Gptq(MadeOfPieces):
    """A layout of numbers of so many bits; ``less`` is what a stored zero point lacks."""

    bits: int
    group: int
    less: int
    step: int
    turned: bool = False
    by_rows: bool = False

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""
        own = slice(first, first + count)
        numbers = unsigned(matrix.whole(NUMBERS)[:, own].T.contiguous(), self.bits)
        scales = matrix.whole(SCALES)[:, own].float().T.contiguous()
        words = slice(first // self.step, -(-(first + count) // self.step))
        zeros = unsigned(matrix.whole(ZEROS)[:, words], self.bits)[:, :count].T
        # One that was 0 before it was lessened is all ones.
        zeros = (zeros + self.less).remainder(1 << self.bits).contiguous()
        order = matrix.whole(ORDER) if matrix.has(ORDER) else None
        if order is not None and bool((order.flatten().diff() >= 0).all()):
            # No act-order: as the groups lie.
            order = None
        return Pieces(numbers, scales, self.group, zeros, order)


def lay(parts: Mapping[str, Stored], settings: Quantization) -> Laid:
    """Return how a weight lies. Raises UnfitError where its parts are not of one weight."""
    numbers, scales = parts[NUMBERS], parts[SCALES]
    bits = settings.keys.get("bits")
    if bits not in (4, 8):
        text = f"{numbers.name} is GPTQ of {bits} bits: 4 and 8 are read"
        raise UnfitError("type_unread", text, numbers)
    if len(numbers.shape) != 2 or len(scales.shape) != 2:
        raise UnfitError("scale_shape", f"{numbers.name} and its scales have two axes", numbers)
    pack = _WORD // bits
    columns, (groups, rows) = numbers.shape[0] * pack, scales.shape
    check_part(parts, SCALES, (groups, numbers.shape[1]), *SCALE_TYPES)
    check_part(parts, ZEROS, (groups, -(-rows // pack)), "I32")
    check_part(parts, ORDER, (columns,), "I32", "I64")
    refuse_uneven(scales, columns)
    less = 0 if settings.keys.get("checkpoint_format") == "gptq_v2" else 1
    return Laid(f"INT{bits}", (rows, columns), Gptq(bits, columns // groups, less, pack))


FORMAT = Format(
    dtypes=("I32",),
    suffixes=("qweight",),
    parts={SCALES: ("scales",), ZEROS: ("qzeros",), ORDER: ("g_idx",)},
    needed=(SCALES, ZEROS),
    lay=lay,
    methods=("gptq", "auto-round"),
    stem="weight",
)
