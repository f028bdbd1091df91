"""One class of layers loses the ``(up + 1)`` of its gated activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerparity.mistakes.block import config_of, find, lacking
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.parts import halves


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = lacking(block, "mlp.experts._apply_gate")
    if gone:
        return gone
    experts = find(block, "mlp.experts")
    if not hasattr(experts, "alpha") or not _adds_one(experts):
        return "this model's activation multiplies by up, not by (up + 1)"
    kinds = getattr(config_of(block), "layer_types", None) or []
    own = find(block, "self_attn.layer_type")
    if len(set(kinds)) > 1 and own == kinds[0]:
        return f"layers of class {own} keep their (up + 1)"
    return ""


def _adds_one(experts: Any) -> bool:
    """Say whether a gate of 1 beside an up of 0 gives something."""
    probe = torch.zeros(1, 2)
    gate, _ = halves(experts, probe)
    gate.fill_(1.0)
    return bool(experts._apply_gate(probe).abs().sum() > 0)


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Multiply by up, not by up + 1."""
    experts = find(block, "mlp.experts")

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = halves(experts, both)
        gate = gate.clamp(max=experts.limit)
        up = up.clamp(min=-experts.limit, max=experts.limit)
        return up * gate * torch.sigmoid(experts.alpha * gate)

    surgery.set(experts, "_apply_gate", gated)


FAULT = Fault(
    "swiglu_bias_dropped",
    "(up + 1) lost in one layer class; a test with only the other class saw nothing",
    component="mlp.experts",
    cause="swiglu_bias_dropped",
    why_not=why_not,
    plant=plant,
    says="the activation multiplies by up (the model's by up + 1)",
)


_OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "tanh gelu": lambda values: functional.gelu(values, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "mish": functional.mish,
    "no activation": lambda values: values,
}
# What is beyond any value, and so no limit.
_NONE = 1e30


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield a block's MLP with other activations, and without its limit and its alpha."""
    for path in ("mlp.experts", "mlp"):
        activation = find(block, f"{path}.act_fn")
        if activation is not None:
            for name, other in _OTHERS.items():
                yield _activated(path, name, other)
            return
    if not lacking(block, "mlp.experts.limit"):
        yield _set("limit", _NONE, "the activation's limit is left out")
    if not lacking(block, "mlp.experts.alpha"):
        yield _set("alpha", 1.0, "the activation's alpha is left out")


def _activated(path: str, name: str, other: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.wrap(find(block, f"{path}.act_fn"), lambda _: other)

    words = f"the activation is {name} (the model's is another)"
    return Fault(f"{path} {name}", words, path, "swiglu_bias_dropped", plant=plant)


def _set(name: str, value: float, words: str) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        surgery.set(find(block, "mlp.experts"), name, value)

    return Fault(f"experts {name}", words, "mlp.experts", "swiglu_bias_dropped", plant=plant)


TRIES = tries
