"""How a tensor of a GGUF file becomes a weight; the package `gguf` decodes its blocks.

`ggml-common.h` has the blocks: a few numbers of few bits beside the scale, or scale and minimum,
that they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from layerparity.model.packed import NUMBERS, Matrix
from layerparity.numbers.pieces import IN_BLOCKS, IN_NIBBLES, WITH_OFFSETS, Pieces

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

# The role of the part whose numbers alternate with a weight's.
OTHER = "other"
# Where in a block its scale lies, in bytes, and in the two after it its minimum; else it is first.
_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
_MXFP4 = "MXFP4"
# e8m0 of this is one, in the units that `gguf` has the numbers in.
_ONE = 127


@dataclass(frozen=True)
class GgufLayout:
    """A tensor of the type ``kind``, rows of which are ``columns`` numbers.

    With ``paired`` rows, so many at a time, the first half of them stands at even places.
    ``woven`` is the axis along which another part's numbers alternate with these. ``less`` is taken
    off each value. ``turned``: the weight has rows and columns swapped.
    """

    kind: str
    paired: int = 1
    woven: int | None = None
    less: float = 0.0
    turned: bool = False

    @property
    def step(self) -> int:
        """Rows between two places where the weight can be cut."""
        return self.paired if self.woven != 0 else 2

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be read without the others."""
        return not self.turned

    def values(self, matrix: Matrix, first: int, count: int) -> torch.Tensor:
        """Return ``count`` rows from ``first`` on, float32 [row, column]."""
        found = self._ordered(*(self._decoded(raw) for raw in self._raw(matrix, first, count)))
        return found - self.less if self.less else found

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from.

        Numbers are those of a block by the scales within it; the whole block's are ``scales``.
        """
        import torch

        if self.kind not in (*IN_BLOCKS, _MXFP4) or self.woven is not None or self.less:
            numbers = self.values(matrix, first, count)
            return Pieces(numbers, torch.ones(1, 1), numbers.shape[1])
        (raw,) = self._raw(matrix, first, count)
        scales, bare, minima = self._split(raw)
        numbers = self._ordered(self._decoded(bare))
        offsets = None if minima is None else self._ordered(self._decoded(minima))
        width = numbers.shape[1] // scales.shape[1]
        apart = width // 2 if self.kind in (*IN_NIBBLES, _MXFP4) else 0
        return Pieces(numbers, self._ordered(scales), width, offsets=offsets, apart=apart)

    def _raw(self, matrix: Matrix, first: int, count: int) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of rows of each part, [row, byte]."""
        import torch

        if self.woven == 0:
            first, count = first // 2, count // 2
        roles = [role for role in (NUMBERS, OTHER) if matrix.has(role)]
        rows = [matrix.rows(role, first, count).view(torch.uint8) for role in roles]
        return [each.reshape(count, -1).numpy() for each in rows]

    def _split(
        self, raw: npt.NDArray[np.uint8]
    ) -> tuple[torch.Tensor, npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None]:
        """Return the scales of blocks, float32 [row, block], and bytes with scales of one.

        The last are such bytes again, of minima alone; None where there are none.
        """
        import numpy as np
        import torch

        blocks = raw.reshape(len(raw), -1, _block_of(self.kind)[1])
        at, bare = _SCALE_AT.get(self.kind, 0), blocks.copy()
        if self.kind == _MXFP4:
            scales = torch.exp2(torch.from_numpy(blocks[..., at]).float() - _ONE)
            bare[..., at] = _ONE
            return scales, bare.reshape(raw.shape), None
        held = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
        bare[..., at : at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        scales = torch.from_numpy(held.astype(np.float32))
        if self.kind not in WITH_OFFSETS:
            return scales, bare.reshape(raw.shape), None
        minima = blocks.copy()
        minima[..., at : at + 2] = bare[..., at + 2 : at + 4] = 0
        return scales, bare.reshape(raw.shape), minima.reshape(raw.shape)

    def _decoded(self, raw: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Return the values of rows, float32 [row, column], as they lie."""
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        # A scale that is no number says itself in the values.
        with np.errstate(all="ignore"):
            values = dequantize(raw, GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.array(values, np.float32, copy=None))

    def _ordered(self, own: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows of each part [row, column] in the weight's order."""
        import torch

        if other is not None:
            shape = [size * (1 + (axis == self.woven)) for axis, size in enumerate(own.shape)]
            return torch.stack([own, other], 1 + (self.woven or 0)).reshape(shape)
        if self.paired == 1:
            return own
        pairs = own.view(-1, self.paired // 2, 2, own.shape[1])
        return pairs.transpose(1, 2).reshape(own.shape)


@cache
def can_decode(kind: str) -> bool:
    """Say whether the package `gguf` decodes the blocks of a type."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, _block_of(kind)[1]), np.uint8), GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of so many numbers of a type."""
    numbers, size = _block_of(kind)
    return columns // numbers * size


def _block_of(kind: str) -> tuple[int, int]:
    """Return how many numbers a block of a type has, and how many bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
