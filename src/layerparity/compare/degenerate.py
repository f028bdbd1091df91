"""Degenerate: a tensor that holds one number everywhere, or none that counts: denormals, NaN."""

from __future__ import annotations

import torch

from layerparity.metrics.base import Chunk

CONSTANT, DENORMAL, NONFINITE = "constant", "denormal", "nonfinite"
# A tensor whose first numbers differ is not looked at whole.
_FIRST = 64


class Degenerate:
    """What all numbers of one floating tensor have in common, fed piece by piece."""

    def __init__(self) -> None:
        self._open = {CONSTANT, DENORMAL, NONFINITE}
        self._first: float | None = None
        self._seen = 0

    def feed(self, values: torch.Tensor) -> None:
        """Look at one more piece; most tensors are settled by the first few numbers of it."""
        self._seen += values.numel()
        for piece in (values[:1] if values.dim() > 1 else values[:_FIRST], values):
            if not self._open or not piece.numel():
                return
            if self._first is None:
                self._first = float(piece.reshape(-1)[0])
            first = self._first
            self._open = {name for name in self._open if _holds(name, piece, first)}

    def result(self) -> tuple[str, float] | None:
        """Return what the tensor is, with the number it holds where it is constant, or None."""
        if self._seen < 2 or self._first is None:
            return None
        for name in (NONFINITE, CONSTANT, DENORMAL):
            if name in self._open:
                return name, self._first if name == CONSTANT else 1.0
        return None


def _holds(name: str, piece: torch.Tensor, first: float) -> bool:
    """Say whether all of a piece is as ``name`` says."""
    if piece.dtype.itemsize == 1:
        # Eight-bit numbers have no arithmetic of their own.
        piece = piece.float()
    if name == CONSTANT:
        return bool(piece.eq(first).all())
    if name == NONFINITE:
        return not bool(piece.isfinite().any())
    return bool(piece.abs().lt(torch.finfo(piece.dtype).smallest_normal).all())


class BothSides:
    """Both tensors of a site of real numbers, as they are streamed."""

    def __init__(self) -> None:
        self._sides = {"golden": Degenerate(), "candidate": Degenerate()}

    def feed(self, chunk: Chunk) -> None:
        """Look at one more piece of both."""
        self._sides["golden"].feed(chunk.golden)
        self._sides["candidate"].feed(chunk.candidate)

    def metrics(self) -> dict[str, float]:
        """Return ``candidate_constant`` and the like; nothing where both sides are alike."""
        found = {side: held.result() for side, held in self._sides.items()}
        if found["golden"] == found["candidate"]:
            return {}
        return {f"{side}_{what[0]}": what[1] for side, what in found.items() if what is not None}
