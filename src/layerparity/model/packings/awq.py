"""AWQ: words of 32 bits along the outputs, eight numbers in an order of its own.

``qweight`` [in, out / 8], ``qzeros`` [group, out / 8] and ``scales`` [group, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, SCALES, ZEROS, MadeOfPieces, Matrix
from layerparity.model.packing_format import (
    SCALE_TYPES,
    Format,
    Laid,
    Quantization,
    UnfitError,
    check_part,
    refuse_uneven,
)
from layerparity.numbers.pieces import AWQ_PLACES, Pieces

if TYPE_CHECKING:
    import torch

_BITS, _PACK = 4, 8


@dataclass(frozen=True)
class Awq(MadeOfPieces):
    """A layout of four-bit numbers, of which ``group`` of a row share a scale."""

    group: int
    step: int = _PACK
    turned: bool = False
    by_rows: bool = False

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""
        words = slice(first // _PACK, (first + count) // _PACK)
        numbers = _outputs(matrix.whole(NUMBERS)[:, words])
        zeros = _outputs(matrix.whole(ZEROS)[:, words])
        scales = matrix.whole(SCALES)[:, first : first + count].float().T.contiguous()
        return Pieces(numbers, scales, self.group, zeros)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of words [in, word] as float32 [out, in]."""
    import torch

    turned = words.T.contiguous()
    numbers = torch.empty(len(turned), _PACK, turned.shape[1])
    for output, place in enumerate(AWQ_PLACES):
        numbers[:, output] = (turned >> (_BITS * place)) & ((1 << _BITS) - 1)
    return numbers.view(-1, turned.shape[1])


def lay(parts: Mapping[str, Stored], settings: Quantization) -> Laid:
    """Return how a weight lies. Raises UnfitError where its parts are not of one weight."""
    numbers, scales = parts[NUMBERS], parts[SCALES]
    bits, version = settings.keys.get("bits", _BITS), settings.keys.get("version", "gemm")
    if bits != _BITS or str(version).lower() != "gemm":
        text = f"{numbers.name} is AWQ of {bits} bits, version {version}: 4 and gemm are read"
        raise UnfitError("type_unread", text, numbers)
    if len(numbers.shape) != 2 or len(scales.shape) != 2:
        raise UnfitError("scale_shape", f"{numbers.name} and its scales have two axes", numbers)
    columns, (groups, rows) = numbers.shape[0], scales.shape
    check_part(parts, SCALES, (groups, numbers.shape[1] * _PACK), *SCALE_TYPES)
    check_part(parts, ZEROS, (groups, rows // _PACK), "I32")
    refuse_uneven(scales, columns)
    return Laid("INT4", (rows, columns), Awq(columns // groups))


FORMAT = Format(
    dtypes=("I32",),
    suffixes=("qweight",),
    parts={SCALES: ("scales",), ZEROS: ("qzeros",)},
    needed=(SCALES, ZEROS),
    lay=lay,
    methods=("awq",),
    stem="weight",
)
