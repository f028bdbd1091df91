"""What a model does only from some length of a text on, read off its configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from layerparity.anatomy.mechanism import Mechanism
from layerparity.ground.errors import UserError

# transformers' names of attention that sees a part of the tokens: what says how many, and our name.
_PARTIAL = {
    "sliding_attention": ("sliding_window", "the sliding window"),
    "chunked_attention": ("attention_chunk_size", "attention in chunks"),
}
# Yarn's default: of pairs that turn so often within the original length nothing is changed.
_BETA_FAST = 32


def mechanisms_of(config: Mapping[str, Any]) -> tuple[Mechanism, ...]:
    """Return what a model does from a length on, of the values of its config.json.

    Nothing of an architecture that transformers does not know.
    """
    from layerparity.model.architecture import read_config

    try:
        settled = read_config(config)
    except UserError:
        return ()
    return (*_partial_attention(settled), *_rotary(settled), *_temperature(settled))


def _partial_attention(config: Any) -> Iterator[Mechanism]:
    kinds = getattr(config, "layer_types", None)
    for kind, (key, name) in _PARTIAL.items():
        size = getattr(config, key, None)
        layers = tuple(n for n, each in enumerate(kinds or ()) if each == kind)
        # Without kinds of layers all of them look through the window that there is.
        if size and (layers or (kinds is None and kind == "sliding_attention")):
            yield Mechanism(f"{name} of {size} tokens", size + 1, layers)
    chosen = getattr(config, "index_topk", None)
    if chosen:
        yield Mechanism(f"the choice of {chosen} tokens to attend to", chosen + 1)


def _rotary(config: Any) -> Iterator[Mechanism]:
    """Yield what rotary embeddings do from a length on, as transformers computes their tables.

    The formulas are those of its `modeling_rope_utils`. Where a scaling changes only frequencies
    that turn slowly, the fastest of them makes its first turn within that length.
    """
    given = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in given.values() if isinstance(each, Mapping)]
    for rope in {str(each): each for each in nested or [given]}.values():
        kind = rope.get("rope_type", "default")
        most = getattr(config, "max_position_embeddings", None)
        own = getattr(config, "original_max_position_embeddings", None)
        first = rope.get("original_max_position_embeddings") or own or most
        if not first:
            continue
        if kind == "longrope":
            yield Mechanism("the long factors of longrope", first + 1)
        elif kind == "dynamic":
            yield Mechanism("dynamic rotary scaling", first + 1)
        elif kind == "llama3":
            turn = math.ceil(first / rope.get("high_freq_factor", 1))
            yield Mechanism("llama3's rotary scaling", turn)
        elif kind == "yarn":
            turn = math.ceil(first / (rope.get("beta_fast") or _BETA_FAST))
            yield Mechanism("yarn's rotary scaling", turn)
        if rope.get("llama_4_scaling_beta"):
            yield Mechanism("the temperature of attention", first + 1)


def _temperature(config: Any) -> Iterator[Mechanism]:
    """Yield Llama 4's: queries of layers without rotary embeddings grow with the position."""
    if getattr(config, "attn_temperature_tuning", None) and getattr(config, "floor_scale", None):
        rotary = getattr(config, "no_rope_layers", None) or ()
        layers = tuple(n for n, each in enumerate(rotary) if not each)
        if layers:
            yield Mechanism("the temperature of attention", int(config.floor_scale), layers)
