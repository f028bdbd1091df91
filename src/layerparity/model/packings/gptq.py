"""GPTQ: words of 32 bits along the inputs, zero points along the outputs, maybe an act-order.

``qweight`` [in / 8, out], ``qzeros`` [group, out / 8], ``scales`` [group, out] and ``g_idx`` [in],
the group of each input. Of the first version of the format a zero point is stored less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, ORDER, SCALES, ZEROS, Matrix, unsigned
from layerparity.model.packing_format import Format, Laid, Quantization, UnfitError
from layerparity.numbers.pieces import Pieces

_WORD = 32


@dataclass(frozen=True)
class Gptq:
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
    numbers, scales, zeros = parts[NUMBERS], parts[SCALES], parts[ZEROS]
    bits = settings.keys.get("bits")
    if bits not in (4, 8):
        text = f"{numbers.name} is GPTQ of {bits} bits: 4 and 8 are read"
        raise UnfitError("type_unread", text, numbers)
    if any(len(each.shape) != 2 for each in (numbers, scales, zeros)):
        raise UnfitError("scale_shape", f"{numbers.name} and its parts have two axes each", numbers)
    pack = _WORD // bits
    rows, columns, groups = scales.shape[1], numbers.shape[0] * pack, scales.shape[0]
    due = (groups, -(-rows // pack))
    if numbers.shape[1] != rows or zeros.shape != due or columns % max(groups, 1):
        text = (
            f"{scales.name} has the shape {list(scales.shape)}, {zeros.name} {list(zeros.shape)}, "
            f"which do not fit {numbers.name} with {list(numbers.shape)}"
        )
        raise UnfitError("scale_shape", text, scales)
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
