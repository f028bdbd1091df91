"""Compute each token of several by itself, so that it rounds as it does in a pass of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import linear

from layerparity.numbers.arithmetic import Mode, Operation

_PRODUCTS = {torch.mm, torch.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
# A vector's remainder may round these otherwise, since they are approximations. A sum or a product
# of two numbers is the nearest one, whatever instruction makes it.
_CURVES = {torch.sigmoid, torch.Tensor.sigmoid, torch.tanh, torch.Tensor.tanh}
_CURVES |= {torch.exp, torch.Tensor.exp, torch.rsqrt, torch.Tensor.rsqrt, functional.sigmoid}
_CURVES |= {functional.silu, functional.gelu, functional.softplus}
_NORMS = {functional.rms_norm, functional.layer_norm}
# What these make of the last axis alone, they make of each token by itself.
_SUMS = {torch.sum, torch.Tensor.sum, torch.mean, torch.Tensor.mean}
_SUMS |= {torch.softmax, torch.Tensor.softmax, functional.softmax}
_BY_TOKEN = {linear, *_CURVES, *_NORMS}
# The one of torch 2.9, and that of later ones.
_GROUPED = {getattr(torch, "_grouped_mm", None), getattr(functional, "grouped_mm", None)}


class Apart(Mode):
    """Compute each row by itself where others change how it rounds, as if they were not there.

    A product of one row adds its terms in another order than one of several: float32's error is
    about half as large. Of all elements, the last few are put through other instructions than those
    before them. A row has the strides of one alone: they choose the kernel, too.
    """

    answers: Set[Any] | None = frozenset({*_GROUPED, *_PRODUCTS, *_SUMS, *_BY_TOKEN})

    def run(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run one operation, row by row where that rounds otherwise."""
        if func in _GROUPED:
            return _by_group(func, *args, **named)
        if func in _PRODUCTS and args[0].dim() > 1:
            return torch.cat([func(row, *args[1:]) for row in cut(args[0], -2)], -2)
        if func in _BY_TOKEN or (func in _SUMS and _is_of_last(*args, **named)):
            return _by_token(func, *args, **named)
        return func(*args, **named)


def cut(value: torch.Tensor, axis: int) -> list[torch.Tensor]:
    """Return what stands at each place of an axis, of length 1, laid out as if nothing else were.

    Also the stride of an axis of length 1 is that of a tensor alone: torch looks at it.
    """
    return [each.reshape(-1).view(each.shape) for each in value.split(1, axis)]


def _is_of_last(value: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
    """Say whether an operation is along the last axis of a value, and along no other."""
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    return dims in ((-1,), (value.dim() - 1,))


def _by_token(func: Operation, value: torch.Tensor, *args: Any, **named: Any) -> Any:
    """Return a function of each token of [token, ...] or [batch, token, ...] by itself.

    Of [batch, head, query, key] there is one query: attention answers one at a time.
    """
    axis = 0 if value.dim() == 2 else 1
    if value.dim() < 2 or value.shape[axis] == 1 or (value.dim() == 4 and value.shape[-2] == 1):
        return func(value, *args, **named)
    return torch.cat([func(each, *args, **named) for each in cut(value, axis)], axis)


def _by_group(
    func: Operation,
    input: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return [row, out]: each [row, channel] times [channel, out] of its expert.

    ``offs`` [expert] says where each expert's rows end. Torch 2.13 names ``bias`` and ``out_dtype``
    as well, and has neither for these yet.
    """
    assert bias is None
    assert out_dtype in (None, input.dtype)
    # A row is of the first expert whose rows end behind it: one without rows is passed over.
    experts = torch.searchsorted(offs, torch.arange(len(input), device=offs.device), right=True)
    rows, one = zip(cut(input, 0), experts.tolist(), strict=True), torch.ones_like(offs[:1])
    return torch.cat([func(row, weight[at : at + 1], offs=one) for row, at in rows])
