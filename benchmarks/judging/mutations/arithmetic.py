"""A norm, an activation or a residual sum is another computation than the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from judging.mutations.base import Mutation, mutation
from layerparity.mistakes.block import epsilon_name, find, lacking
from layerparity.mistakes.fault import Surgery


def strange_norms(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield a block's norms computed in another way."""
    for path in norms_of(block):
        for name, take in _OTHER_NORMS.items():
            true = ("precision",) if "bfloat16" in name else ()
            true = ("layer_norm_for_rms_norm",) if take is _layer_norm else true
            yield _normed(path, name, take, true)
        yield _unweighted(path)


def strange_sums(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield a block whose residual sum takes something twice, not at all or from elsewhere."""
    yield _sum("adds its input twice", lambda given, out: out + given, "residual_sum")
    yield _sum("leaves its input out", lambda given, out: out - given, "residual_sum")
    yield _sum(
        "adds half of its input once more", lambda given, out: out + 0.5 * given, "residual_sum"
    )
    yield _sum("adds the token before's input", lambda given, out: out - given + given.roll(1, -2))
    yield _sum("is cut to bfloat16's first bits", lambda given, out: _cut(out), "precision")


def norms_of(block: nn.Module) -> list[str]:
    """Return the paths of a block's norms."""
    return [name for name, module in block.named_modules() if _is_norm(module)]


def _is_norm(module: nn.Module) -> bool:
    named = type(module).__name__.endswith("Norm")
    return named and getattr(module, "weight", None) is not None


def _layer_norm(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean = wide.mean(-1, keepdim=True)
    return (wide - mean) * torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + epsilon)


def _half_width(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean = wide[..., : wide.shape[-1] // 2].square().mean(-1, keepdim=True)
    return wide * torch.rsqrt(mean + epsilon)


def _absolute(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    return wide / (wide.abs().mean(-1, keepdim=True) + epsilon)


def _largest(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    return wide / (wide.abs().amax(-1, keepdim=True) + epsilon)


def _all_tokens(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    return wide * torch.rsqrt(wide.square().mean() + epsilon)


def _variance_in_bfloat16(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean = wide.bfloat16().square().mean(-1, keepdim=True)
    return wide * torch.rsqrt(mean + epsilon).to(wide.dtype)


def _factor_in_bfloat16(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean = wide.square().mean(-1, keepdim=True)
    return wide * torch.rsqrt(mean + epsilon).bfloat16().to(wide.dtype)


# By what they do: functions of [..., channel] in float32 or wider, and of the epsilon.
_OTHER_NORMS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "subtracts the mean": _layer_norm,
    "is taken over its first half": _half_width,
    "divides by the mean size": _absolute,
    "divides by the largest": _largest,
    "is taken over all tokens": _all_tokens,
    "takes its variance in bfloat16": _variance_in_bfloat16,
    "rounds its factor to bfloat16": _factor_in_bfloat16,
}


def _normed(
    path: str,
    words: str,
    take: Callable[[torch.Tensor, float], torch.Tensor],
    true: tuple[str, ...],
) -> Mutation:
    """Return the mistake of a norm, by its path, that divides by something else."""

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return lacking(block, path)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        norm = find(block, path)
        epsilon = getattr(norm, epsilon_name(norm))
        # Some families count their weights from 1.
        counted = 1.0 if type(norm).__name__.startswith(("Gemma", "Qwen3Next")) else 0.0

        def forward(values: torch.Tensor) -> torch.Tensor:
            wide = values.to(torch.promote_types(values.dtype, torch.float32))
            scaled: torch.Tensor = take(wide, epsilon) * (counted + norm.weight.to(wide.dtype))
            return scaled.to(values.dtype)

        surgery.set(norm, "forward", forward)

    return mutation(
        "norm", f"{path} {words}", path, size=1.0, why_not=why_not, plant=plant, true=true
    )


def _unweighted(path: str) -> Mutation:
    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return lacking(block, path)

    def plant(block: nn.Module, surgery: Surgery) -> None:
        norm = find(block, path)
        own = 0.0 if type(norm).__name__.startswith(("Gemma", "Qwen3Next")) else 1.0
        with torch.no_grad():
            norm.weight.fill_(own)

    words = f"{path} has no weight"
    true = ("weights_altered", "bias_frozen_in_graph", "never_loaded")
    return mutation(
        "norm", words, path, size=1.0, why_not=why_not, plant=plant, by_weights=True, true=true
    )


def _sum(
    words: str, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *true: str
) -> Mutation:
    """Return the mistake of a block, whose output ``change(input, output)`` takes its place."""

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
            output = exact(hidden_states, *args, **named)
            if isinstance(output, tuple):
                return (change(hidden_states, output[0]).to(hidden_states.dtype), *output[1:])
            return change(hidden_states, output).to(hidden_states.dtype)

        return forward

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(block, around)

    return mutation("sum", f"residual sum {words}", "", size=1.0, plant=plant, true=true)


def _cut(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its mantissa rounded to four bits, in its dtype."""
    mantissa, exponent = torch.frexp(values.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(values.dtype)
