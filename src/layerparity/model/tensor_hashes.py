"""Hash a tensor's bytes as stored and its values as held, piece by piece while it is filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from blake3 import blake3

# Values that are widened at a time.
_PIECE = 1 << 20


@dataclass(frozen=True)
class TensorHashes:
    """The hashes of a tensor as it is stored and as it is held.

    ``stored`` is the hash of the stored bytes; of an FP8 weight, that of its values in the type
    that a converted checkpoint has. ``values`` is what `values_digest` gives for the values in
    place, in the stored order. ``exact`` says that none of them was rounded.
    """

    stored: str
    values: str
    exact: bool


def values_digest(tensor: torch.Tensor) -> str:
    """Return the BLAKE3 hash of a CPU tensor's values in row-major order, of any shape and dtype.

    It covers bfloat16 numbers where all the values are such, and float32 numbers otherwise.
    """
    values = _Values()
    values.add(tensor.detach().reshape(-1))
    return values.hexdigest()


class HashAccount:
    """Gathers, piece by piece in the stored order, what `TensorHashes` says.

    ``same`` says that what is hashed as stored is what the hash of the values covers, too;
    ``rounds`` that values may lose something on their way into their place.
    """

    def __init__(self, *, same: bool, rounds: bool) -> None:
        self._rounds = rounds
        self._stored = blake3()
        self._values = None if same else _Values()
        self._exact = True

    @classmethod
    def of_cast(cls, own: torch.dtype, held: torch.dtype) -> HashAccount:
        """Return an account of values that are stored as ``own`` and cast to ``held``."""
        rounds = torch.promote_types(own, held) != held
        return cls(same=own is torch.bfloat16 and not rounds, rounds=rounds)

    def read(self, raw: torch.Tensor) -> None:
        """Take note of stored bytes, or of what stands for them: a tensor of any shape or dtype."""
        self._stored.update(bytes_of(raw))

    def put(self, held: torch.Tensor, source: torch.Tensor) -> None:
        """Take note of values in place, and of those that they were cast from, in one shape."""
        if self._values is not None:
            self._values.add(held.reshape(-1))
        if self._rounds and self._exact:
            # NaN stays NaN, and is unequal to itself.
            same = (held.to(source.dtype) == source) | source.isnan()
            self._exact = bool(same.all())

    def done(self) -> TensorHashes:
        """Return what was gathered."""
        stored = self._stored.hexdigest()
        values = stored if self._values is None else self._values.hexdigest()
        return TensorHashes(stored, values, self._exact)


class _Values:
    """Hashes values as bfloat16 numbers for as long as all are such, and as float32 numbers."""

    def __init__(self) -> None:
        self._narrow, self._wide = blake3(), blake3()
        self._is_narrow = True

    def add(self, flat: torch.Tensor) -> None:
        """Add values [value] of any one type."""
        if flat.dtype == torch.bfloat16:
            self._narrow.update(bytes_of(flat))
            return
        for piece in flat.split(_PIECE):
            wide = piece.float().contiguous()
            self._wide.update(bytes_of(wide))
            self._is_narrow = self._is_narrow and not (wide.view(torch.int32) & 0xFFFF).any()
            if self._is_narrow:
                self._narrow.update(bytes_of(wide.to(torch.bfloat16)))

    def hexdigest(self) -> str:
        """Return the hash of what was added."""
        return str((self._narrow if self._is_narrow else self._wide).hexdigest())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor of any shape in row-major order, uncopied if they lie so."""
    raw: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return raw
