"""Shape: the numbers of an architecture that decide how much memory it needs beside its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_WINDOWED = "sliding_attention"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in elements.

    ``experts`` and ``top_k`` are 0 for a dense model. ``windows`` holds, for each block, the number
    of tokens its attention looks back, or 0 for all of them.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    expert_intermediate: int
    experts: int
    top_k: int
    vocabulary: int
    windows: tuple[int, ...]


def shape_of(config: Any) -> Shape:
    """Return the shape that transformers' configuration describes."""
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    intermediate = int(_first(text, ("intermediate_size",)) or 4 * hidden)
    experts = _first(text, _EXPERTS)
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=_first(text, ("num_key_value_heads",)) or heads,
        head_dim=_first(text, ("head_dim",)) or hidden // heads,
        intermediate=intermediate,
        expert_intermediate=_first(text, ("moe_intermediate_size",)) or intermediate,
        experts=experts,
        top_k=_first(text, _TOP_K) or 1 if experts else 0,
        vocabulary=int(text.vocab_size),
        windows=_windows(text),
    )


def _first(text: Any, names: tuple[str, ...]) -> int:
    """Return the first of some keys that is a number above 0, or 0."""
    found = (getattr(text, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), 0)


def _windows(text: Any) -> tuple[int, ...]:
    window = _first(text, ("sliding_window",))
    kinds = getattr(text, "layer_types", None) or [""] * int(text.num_hidden_layers)
    return tuple(window if kind == _WINDOWED else 0 for kind in kinds)
