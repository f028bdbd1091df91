"""Constants: a wrong epsilon, scale, rotary base or activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from judging.mutations.base import SIZES, Mutation, mutation
from layerparity.mistakes.block import epsilon_name, find, lacking, needs
from layerparity.mistakes.fault import ChangeArguments, Pass, Surgery
from layerparity.mistakes.rotary_tables import no_plain_tables, parameters, tables

_NORMS = (
    "input_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
)
_EPSILONS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_BASES = (0.01, 0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2.0, 10.0, 100.0)


def constants(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield a block's constants with other values."""
    for path in _NORMS:
        if lacking(block, path):
            continue
        norm = find(block, path)
        own = getattr(norm, epsilon_name(norm))
        for epsilon in _EPSILONS:
            if epsilon != own:
                yield _epsilon(path, epsilon)
        yield _one_plus(path)
    for size in SIZES:
        for sign in (1, -1):
            yield _attribute("self_attn", "scaling", 1 + sign * size)
            yield _routed_scale(1 + sign * size)
            yield _tables_scaled(1 + sign * size)
    for factor in _BASES:
        yield _base(factor)
    for name in ("gelu", "relu", "mish", "identity"):
        yield _activation(name)


def _epsilon(path: str, epsilon: float) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        norm = find(block, path)
        surgery.set(norm, epsilon_name(norm), epsilon)

    story = f"{path} epsilon {epsilon:g}"
    why_not, true = needs(path), ("scale", "norm_epsilon")
    return mutation("constant", story, path, size=epsilon, why_not=why_not, plant=plant, true=true)


def _one_plus(path: str) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            find(block, f"{path}.weight").add_(1)

    story = f"{path} weight counted from 1"
    return mutation(
        "constant",
        story,
        path,
        size=1.0,
        why_not=needs(path),
        plant=plant,
        by_weights=True,
        # Where all weights are alike, as those counted from 1 at first, it is one factor.
        true=("weights_altered", "scale"),
    )


def _attribute(path: str, name: str, factor: float) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        module = find(block, path)
        surgery.set(module, name, getattr(module, name) * factor)

    story = f"{path} {name} times {factor:g}"
    why_not = needs(f"{path}.{name}")
    return mutation("constant", story, path, size=abs(factor - 1), why_not=why_not, plant=plant)


def _routed_scale(factor: float) -> Mutation:
    def around(route: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            logits, weights, chosen = route(*args)
            return logits, weights * factor, chosen

        return forward

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(find(block, "mlp.gate"), around)

    story = f"mlp.gate weights times {factor:g}"
    size, why_not, true = abs(factor - 1), needs("mlp.gate"), ("scale",)
    return mutation(
        "constant", story, "mlp.gate", size=size, why_not=why_not, plant=plant, true=true
    )


def _activation(name: str) -> Mutation:
    other = {"identity": lambda values: values}.get(name) or getattr(functional, name)

    def activation(block: nn.Module) -> Any:
        return find(block, "mlp.experts.act_fn") or find(block, "mlp.act_fn")

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return "" if activation(block) is not None else "this block has no plain activation"

    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(activation(block), lambda _: other)

    story, true = f"mlp activation {name}", ("swiglu_bias_dropped",)
    return mutation(
        "constant", story, "mlp.experts", size=1.0, why_not=why_not, plant=plant, true=true
    )


def _base(factor: float) -> Mutation:
    def arguments(given: Mapping[str, Any], each: Pass) -> dict[str, Any]:
        cos, _ = given["position_embeddings"]
        theta = parameters(each.config)["rope_theta"] * factor
        other = tables(each.position_ids, cos.shape[-1], theta, each.dtype)
        return {**given, "position_embeddings": other}

    return _rotary(f"base times {factor:g}", factor, arguments, ("rotary",))


def _tables_scaled(factor: float) -> Mutation:
    def arguments(given: Mapping[str, Any], each: Pass) -> dict[str, Any]:
        cos, sin = given["position_embeddings"]
        return {**given, "position_embeddings": (cos * factor, sin * factor)}

    return _rotary(f"tables times {factor:g}", factor, arguments, ("rotary", "scale"))


def _rotary(
    what: str, factor: float, arguments: ChangeArguments, true: tuple[str, ...]
) -> Mutation:
    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        return no_plain_tables(block)

    story, size = f"self_attn rotary {what}", abs(factor - 1)
    return mutation(
        "constant",
        story,
        "self_attn",
        size=size,
        why_not=why_not,
        arguments=arguments,
        true=true,
    )
