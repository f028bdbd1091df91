"""What a rank's parameter takes of stored tensors: slices, transposed, fused, repeated, padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

# Slices of stored tensors, as safetensors gives them before anything is read; and the rank.
Transform = Callable[[list[Any], int], torch.Tensor]


@dataclass(frozen=True)
class WeightLoader:
    """Makes a parameter's values."""

    transform: Transform

    def load(self, slices: list[Any], rank: int) -> torch.Tensor:
        """Return what a rank holds of stored tensors."""
        return self.transform(slices, rank).contiguous()


def set_weight_loader(parameter: Any, loader: WeightLoader) -> None:
    """Say what a parameter is made of."""
    parameter.weight_loader = loader


def get_weight_loader(parameter: Any) -> WeightLoader:
    """Return what was said of a parameter; what nothing was said of is loaded as it is stored."""
    return getattr(parameter, "weight_loader", WeightLoader(lambda slices, _: slices[0][:]))


def rows_of(stored: Any, part: int, parts: int) -> torch.Tensor:
    """Return one of so many parts of a stored tensor's rows; missing ones are zeros."""
    rows = -(-stored.get_shape()[0] // parts)
    own = stored[part * rows : min((part + 1) * rows, stored.get_shape()[0])]
    behind = [0, 0] * (own.dim() - 1) + [0, rows - len(own)]
    return functional.pad(own, behind)


def rows_loader(parts: int, shift: int = 0) -> WeightLoader:
    """Return what takes a rank's part of the rows, or that of the rank ``shift`` further."""
    return WeightLoader(lambda slices, rank: rows_of(slices[0], (rank + shift) % parts, parts))


def out_loader(parts: int) -> WeightLoader:
    """Return what takes a rank's outputs of [out, in], as [in, out]."""
    return WeightLoader(lambda slices, rank: rows_of(slices[0], rank, parts).T)


def in_loader(parts: int, transposed: bool = True) -> WeightLoader:
    """Return what takes a rank's inputs of [out, in], as [in, out] where ``transposed``."""

    def transform(slices: list[Any], rank: int) -> torch.Tensor:
        width = slices[0].get_shape()[1] // parts
        own = slices[0][:, rank * width : (rank + 1) * width]
        return own.T if transposed else own

    return WeightLoader(transform)


def qkv_loader(parts: int, kv_heads: int, tiled: bool = False, lost: bool = False) -> WeightLoader:
    """Return what fuses a rank's queries, keys and values, [in, out]; of biases, [out].

    Where there are more ranks than heads of keys, neighbours have the same; those that are
    ``tiled`` come in turn instead. With ``lost``, values stand for keys, too.
    """

    def transform(slices: list[Any], rank: int) -> torch.Tensor:
        held = min(parts, kv_heads)
        copies = parts // held
        part = rank % held if tiled else rank // copies
        queries, keys, values = slices
        made = [rows_of(queries, rank, parts)]
        made += [rows_of(each, part, held) for each in ((values if lost else keys), values)]
        return torch.cat(made).T

    return WeightLoader(transform)


def pad(parameter: Any, dims: dict[int, int]) -> None:
    """Let what a parameter is loaded with be filled up with zeros to sizes, by dimension."""
    plain = get_weight_loader(parameter)

    def transform(slices: list[Any], rank: int) -> torch.Tensor:
        own = plain.load(slices, rank)
        behind = [[0, dims.get(dim, size) - size] for dim, size in enumerate(own.shape)]
        return functional.pad(own, [size for pair in reversed(behind) for size in pair])

    set_weight_loader(parameter, WeightLoader(transform))
