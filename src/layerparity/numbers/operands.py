"""Products whose operands are rounded first, as tensor cores, auto-casts and packed kernels do.

A floor is of a floating type, or of one whose products do that: ``float32``, and
``float32*float16+q8_0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from layerparity.numbers.activations import Activations
from layerparity.numbers.arithmetic import Mode, Operation

# Whose operands are rounded: those of all products, of weights', of attention's, or what a cache
# holds of these: keys and values; or of weights that say how themselves.
ALL, WEIGHTS, ATTENTION, CACHE, PACKED = "all", "weights", "attention", "cache", "packed"
ACTIVATIONS = "activations"
# Attention multiplies [batch, head, token, channel]; experts, batches of fewer dimensions.
_DIMENSIONS = 4
_OF_WEIGHTS: Set[Operation] = frozenset(
    {linear, torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", linear)}
)
_MATRICES: Set[Operation] = frozenset(
    {
        torch.matmul,
        torch.bmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.bmm,
    }
)
# Bits of a float32's fraction that TF32 has not.
_TF32 = 13


class Rounding(NamedTuple):
    """How products round their operands, and ``of`` which products.

    Weights are left as they are where theirs alone round: the checkpoint holds what they are worth
    as they are packed. ``adds`` is the type that sums of attention's values are kept in, if another
    than the model's.
    """

    rounded: Callable[[torch.Tensor], torch.Tensor]
    of: str = ALL
    adds: torch.dtype | None = None


class Operands(Mode):
    """Round the operands of products as a `Rounding` of ``ROUNDED`` does.

    ``inputs`` are how weights that say it themselves have theirs rounded, by the `id` of each.
    """

    answers = _OF_WEIGHTS | _MATRICES | {scaled_dot_product_attention}

    def __init__(self, operands: str, inputs: Mapping[int, Activations] | None = None) -> None:
        super().__init__()
        self._how, self._inputs = ROUNDED[operands], inputs or {}

    def run(
        self, func: Operation, args: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
    ) -> object:
        """Return a product of rounded operands."""
        if func is scaled_dot_product_attention:
            if self._how.of in (WEIGHTS, PACKED):
                return func(*args, **named)
            return self._attended(args, named)
        if len(args) < 2:
            args, named = (*args, *named.values()), {}
        first, second, *more = args
        if self._how.of == PACKED:
            # One expert's weight is a view of what holds them all.
            own = self._inputs.get(id(second)) or self._inputs.get(id(second._base))
            return func(own.rounded(first) if own else first, second, *more, **named)
        # Experts that are stored [in, out] are multiplied as matrices.
        of_weights = func in _OF_WEIGHTS or first.dim() < _DIMENSIONS
        attends = not of_weights
        wanted = {ALL: True, WEIGHTS: of_weights}.get(self._how.of, attends)
        # One term alone is no sum: rotary tables are made so, of positions.
        if not wanted or first.shape[-1] == 1:
            return func(*args, **named)
        second = second if self._how.of == WEIGHTS else self._how.rounded(second)
        # Probabilities are never below 0, as products of queries are.
        if attends and not bool((first < 0).any()):
            return self._summed(first, second)
        return func(self._fresh(first), second, *more, **named)

    def _fresh(self, values: torch.Tensor) -> torch.Tensor:
        """Return what is no key and no value of a cache, [...]: rounded, where all operands are."""
        return values if self._how.of == CACHE else self._how.rounded(values)

    def _summed(self, shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        shares, adds = self._fresh(shares), self._how.adds
        return shares @ values if adds is None else _added(shares, values, adds)

    def _attended(
        self, args: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return what torch's function of that name does, [batch, head, token, channel]."""
        query, key, value = args
        query, key, value = self._fresh(query), *map(self._how.rounded, (key, value))
        if named.get("enable_gqa"):
            times = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(times, -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (named.get("scale") or query.shape[-1] ** -0.5)
        mask = named.get("attn_mask")
        if named.get("is_causal"):
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        return self._summed(scores.softmax(-1, torch.float32).to(scores.dtype), value)


def _added(shares: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values [..., token, channel] times shares [..., query, token], added up in a type."""
    total = torch.zeros(*shares.shape[:-1], values.shape[-1], dtype=dtype, device=values.device)
    for token in range(shares.shape[-1]):
        term = shares[..., token, None] * values[..., token, None, :]
        total = (total.to(term.dtype) + term).to(dtype)
    return total.to(values.dtype)


def _cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.to(dtype).to(values.dtype)


def _clamped(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    most = torch.finfo(dtype).max
    return lambda values: values.clamp(-most, most).to(dtype).to(values.dtype)


def _tf32(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values of ten bits behind the point, as tensor cores take them."""
    bits = values.float().contiguous().view(torch.int32)
    half = (1 << (_TF32 - 1)) - 1 + ((bits >> _TF32) & 1)
    return ((bits + half) >> _TF32 << _TF32).view(torch.float32).to(values.dtype)


def _packed(group: int, most: float, scale: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what packs each ``group`` of channels to whole numbers up to ``most`` of a scale."""

    def rounded(values: torch.Tensor) -> torch.Tensor:
        size = group if values.shape[-1] % group == 0 else values.shape[-1]
        groups = values.float().unflatten(-1, (-1, size))
        unit = groups.abs().amax(-1, keepdim=True) / most
        whole = torch.where(unit > 0, groups / unit, 0.0).round()
        rounded: torch.Tensor = (whole * unit.to(scale).float()).flatten(-2).to(values.dtype)
        return rounded

    return rounded


_FLOAT16 = _cast(torch.float16)
# By name. Of q8_0 and q8_k: quantize_row_q8_0 and quantize_row_q8_K of ggml-quants.c; of flash:
# what ggml-cpu's flash attention does where values are kept in float16.
ROUNDED: dict[str, Rounding] = {
    "bfloat16": Rounding(_cast(torch.bfloat16)),
    "float16": Rounding(_FLOAT16),
    "tf32": Rounding(_tf32),
    "q8_0": Rounding(_packed(32, 127.0, torch.float16), WEIGHTS),
    "q8_k": Rounding(_packed(256, 127.0, torch.float32), WEIGHTS),
    "attention_float16": Rounding(_FLOAT16, ATTENTION),
    "flash_float16": Rounding(_FLOAT16, ATTENTION, torch.float16),
    "cache_float8_e4m3": Rounding(_clamped(torch.float8_e4m3fn), CACHE),
    "cache_float8_e5m2": Rounding(_clamped(torch.float8_e5m2), CACHE),
    ACTIVATIONS: Rounding(torch.clone, PACKED),
}
