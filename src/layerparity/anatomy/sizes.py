"""Read the sizes of an architecture from its configuration: heads, experts, widths.

Architectures call the same size by different names. The names are listed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# How many experts a block routes between, by whatever name.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_k", "moe_top_k"),
)
_EXPERT_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size")
# Configurations within one that describe a part of every block, as DBRX has them.
_PARTS = ("attn_config", "ffn_config")
_WINDOWED = "sliding_attention"
# The types of blocks, as transformers names them, that keep a state of one size, or nothing.
_WITHOUT_KEYS = ("linear_attention", "mamba", "conv", "moe", "mlp")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder, in elements; where its blocks differ, the largest.

    ``experts`` and ``top_k`` are 0 for a dense model. ``rotary_dims`` are the channels of a head
    that positions rotate. ``windows`` holds, for each block, the number of tokens its attention
    looks back, or 0 for all of them. ``without_keys`` are the blocks that keep no keys and values:
    those with a state of one size, as mamba and linear attention have, or without attention.
    ``value_dim`` is how many channels a head's values have.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    intermediate: int
    expert_intermediate: int
    experts: int
    top_k: int
    vocabulary: int
    windows: tuple[int, ...]
    without_keys: frozenset[int] = frozenset()
    value_dim: int = 0

    @property
    def divided(self) -> dict[str, int]:
        """What tensor parallelism divides, by what a person calls it."""
        named = {
            "attention heads": self.heads,
            "KV heads": self.kv_heads,
            "intermediate size": self.intermediate,
        }
        if self.experts and self.expert_intermediate != self.intermediate:
            named["intermediate size of an expert"] = self.expert_intermediate
        return named


def sizes_of(config: Any) -> ModelSizes:
    """Return the sizes that a configuration describes.

    ``config`` is transformers' configuration, or config.json's values; what they do not say is 0.
    """
    readers = _readers(config)
    hidden, heads = _first(readers, "hidden_size"), _first(readers, "num_attention_heads")
    intermediate = _first(readers, "intermediate_size") or 4 * hidden
    experts = _first(readers, *EXPERT_KEYS)
    window, kinds = _first(readers, "sliding_window"), _value(readers[0], "layer_types")
    if not isinstance(kinds, list | tuple):
        kinds = [""] * _first(readers, "num_hidden_layers")
    head_dim = _first(readers, "head_dim") or (hidden // heads if heads else 0)
    return ModelSizes(
        hidden=hidden,
        heads=heads,
        kv_heads=_first(readers, "num_key_value_heads", "kv_n_heads") or heads,
        head_dim=head_dim,
        rotary_dims=_rotary_dims(readers, head_dim),
        intermediate=intermediate,
        expert_intermediate=_first(readers, *_EXPERT_INTERMEDIATE) or intermediate,
        experts=experts,
        top_k=_first(readers, *_TOP_K) or 1 if experts else 0,
        vocabulary=_first(readers, "vocab_size"),
        windows=tuple(window if kind == _WINDOWED else 0 for kind in kinds),
        without_keys=frozenset(n for n, kind in enumerate(kinds) if kind in _WITHOUT_KEYS),
        value_dim=_first(readers, "v_head_dim") or head_dim,
    )


def _readers(config: Any) -> Sequence[Any]:
    """Return what to ask for a size: the text model's part, or one part for each unlike block.

    Behind the text model's stand those of its parts that have a configuration of their own.
    """
    if isinstance(config, Mapping):
        text = config.get("text_config") or config
    else:
        text = config.get_text_config()
        if text.is_heterogeneous:
            return list(text.per_layer_config)
    return (text, *(part for name in _PARTS if (part := _value(text, name))))


def _first(readers: Iterable[Any], *names: str) -> int:
    """Return the first of some keys that is a number above 0, its largest of all blocks; or 0."""
    for name in names:
        values = (_value(reader, name) for reader in readers)
        numbers = [value for value in values if type(value) is int and value > 0]
        if numbers:
            return max(numbers)
    return 0


def _value(reader: Any, name: str) -> Any:
    return reader.get(name) if isinstance(reader, Mapping) else getattr(reader, name, None)


def _rotary_dims(readers: Sequence[Any], head_dim: int) -> int:
    """Return how many channels of a head positions rotate: all ``head_dim``, or a part of them."""
    reader, own = readers[0], _first(readers, "qk_rope_head_dim")
    if own:
        return own
    settings = _value(reader, "rope_parameters") or _value(reader, "rope_scaling")
    settings = settings if isinstance(settings, Mapping) else {}
    factor = settings.get("partial_rotary_factor") or _value(reader, "partial_rotary_factor")
    if isinstance(factor, int | float) and 0 <= factor <= 1:
        return int(head_dim * factor)
    # transformers turns the key into a factor while it reads the file, and ignores it afterwards.
    read = bool(settings) and not isinstance(reader, Mapping)
    return head_dim if read else _first(readers, "rotary_dim") or head_dim
