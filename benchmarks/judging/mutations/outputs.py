"""What a module gives out goes wrong in ways that have a name: a factor, a constant, one group."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import nn

from judging.mutations.base import HEAD_ROWS, Mutation
from judging.mutations.modules import given_out
from layerparity.mistakes.block import head_dim, lacking
from layerparity.mistakes.parts import parts
from layerparity.mistakes.wrong_output import Change

_FACTORS = (0.25, 0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 4.0)


def named_outputs(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield a module's output times a factor, with a constant added, or one part of it wrong."""
    for path in modules_of(block):
        for factor in _FACTORS:
            story = f"{path} output times {factor:g}"
            yield given_out("factor", story, path, times(factor), ("scale",))
        for size in (0.1, 0.5, 2.0):
            story = f"{path} output plus {size:g} spreads"
            yield given_out("offset", story, path, _plus(size, _spread), ("offset",))
        yield given_out(
            "lost", f"{path} output zero", path, torch.zeros_like, ("degenerate_output",)
        )
        row = draw.randrange(1, 6)
        yield given_out(
            "nonfinite", f"{path} NaN at token {row}", path, _nan_at(row), ("nonfinite",)
        )
        yield _one_channel(path, draw.randrange(32))
    for path in HEAD_ROWS:
        if not lacking(block, path) and head_dim(block):
            yield _one_head(path, head_dim(block), draw.choice((0.0, 0.5, -1.0)))


def strange_outputs(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield a module's output wrong in a way that no rule was written for."""
    for path in modules_of(block):
        first, size = draw.randrange(1, 6), draw.choice((0.003, 0.03, 0.3))
        changes: dict[str, Change] = {
            f"clamped to {2 * size:g} spreads": _clamped(2 * size),
            f"with tokens {first} and {first + 2} swapped": _swapped(first, first + 2),
            f"stale from token {first + 2} on": _stale_from(first + 2),
            f"with noise of {size:g}": _plus(size, _noise),
            "shifted by one channel": lambda x: x.roll(1, -1),
            "with every second channel's sign turned": _alternating,
            "with its last quarter of channels left out": _without_quarter,
            f"with token {first} left out": _without(first),
            "taken of the token before": lambda x: x.roll(1, -2),
            "squared in size": lambda x: x * x.abs() / _spread(x),
        }
        for words, change in changes.items():
            true = {"shifted": ("channels_permuted",), "clamped": ("clamped",)}
            kind = true.get(words.partition(" ")[0], ())
            yield given_out("strange", f"{path} output {words}", path, change, kind)
    for path in HEAD_ROWS:
        size = head_dim(block)
        if not lacking(block, path) and size:
            story = f"{path} output half of a head halved"
            yield given_out("strange", story, path, _half_head(size), ("one_head",))


def modules_of(block: nn.Module) -> list[str]:
    """Return the paths of a block's modules whose output is one tensor [..., channel]."""
    own = [part.component for part in parts(block)] + ["self_attn", "mlp"]
    # A router gives three tensors; what is no module of its own is no place to hook.
    kept = [path for path in dict.fromkeys(own) if path not in ("mlp.gate", "mlp.router")]
    return [path for path in kept if not lacking(block, path)]


def times(factor: float) -> Change:
    """Return what multiplies a tensor of any shape and dtype by a factor."""
    return lambda values: values * factor


def _plus(size: float, what: Change) -> Change:
    return lambda values: values + size * what(values)


def _spread(values: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of a tensor of any shape, a scalar of its dtype."""
    return values.float().square().mean().sqrt().to(values.dtype)


def _noise(values: torch.Tensor) -> torch.Tensor:
    """Return normal noise of a tensor's shape, dtype and spread; the same for the same shape."""
    seeded = torch.Generator().manual_seed(values.numel())
    return torch.empty(values.shape).normal_(generator=seeded).to(values.dtype) * _spread(values)


def _clamped(spreads: float) -> Change:
    def change(values: torch.Tensor) -> torch.Tensor:
        limit = spreads * _spread(values)
        return torch.minimum(torch.maximum(values, -limit), limit)

    return change


def _swapped(left: int, right: int) -> Change:
    """Return a change that swaps two tokens of [..., token, channel], where there are so many."""

    def change(values: torch.Tensor) -> torch.Tensor:
        order = list(range(values.shape[-2]))
        if right < len(order):
            order[left], order[right] = order[right], order[left]
        return values[..., order, :]

    return change


def _stale_from(start: int) -> Change:
    """Return a change that repeats the token before ``start`` from there on."""

    def change(values: torch.Tensor) -> torch.Tensor:
        return values[..., [min(at, start - 1) for at in range(values.shape[-2])], :]

    return change


def _without(token: int) -> Change:
    def change(values: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(values.shape[-2]) != token
        return values * kept.unsqueeze(-1).to(values.dtype)

    return change


def _nan_at(token: int) -> Change:
    def change(values: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(values.shape[-2]) == min(token, values.shape[-2] - 1)
        return values.masked_fill(chosen.unsqueeze(-1), float("nan"))

    return change


def _alternating(values: torch.Tensor) -> torch.Tensor:
    odd = torch.arange(values.shape[-1]) % 2
    return values * (1 - 2 * odd).to(values.dtype)


def _without_quarter(values: torch.Tensor) -> torch.Tensor:
    kept = torch.arange(values.shape[-1]) < values.shape[-1] * 3 // 4
    return values * kept.to(values.dtype)


def _half_head(size: int) -> Change:
    def change(values: torch.Tensor) -> torch.Tensor:
        halved = torch.ones(values.shape[-1], dtype=values.dtype)
        halved[: size // 2] = 0.5
        return values * halved

    return change


def _one_channel(path: str, channel: int) -> Mutation:
    def change(values: torch.Tensor) -> torch.Tensor:
        own = torch.arange(values.shape[-1]) == channel % values.shape[-1]
        return torch.where(own, 1.5 * values, values)

    story = f"{path} output channel {channel} half as large again"
    return given_out("group", story, path, change, ("one_channel",))


def _one_head(path: str, size: int, factor: float) -> Mutation:
    def change(values: torch.Tensor) -> torch.Tensor:
        scaled = torch.ones(values.shape[-1], dtype=values.dtype)
        # Norms of single heads see [..., head, channel], all alike.
        scaled[-size:] = factor
        return values * scaled

    true = ("one_head",) if factor != 0 else ("one_head", "degenerate_output")
    return given_out(
        "group", f"{path} output of its last head times {factor:g}", path, change, true
    )
