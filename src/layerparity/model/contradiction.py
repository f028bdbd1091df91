"""Hold the sizes of config.json against the tensors that a checkpoint has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.sizes import EXPERT_KEYS
from layerparity.model.wrapped import TEXT, is_wrapped, text_name

if TYPE_CHECKING:
    from layerparity.model.header import Stored

# So many times the largest size, or the number of tensors, is no size of a model.
_MANY = 1000
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    *EXPERT_KEYS,
)
_POSITIONS = "max_position_embeddings"
# A table with a row for each position; where positions rotate, no tensor says how many there are.
_TABLE = re.compile(r"(?:^|\.)(?:wpe|embed_positions|position_embeddings?|pos_embed)\.weight$")


def contradiction(config: Mapping[str, Any], tensors: Mapping[str, Stored], lost: int = 0) -> str:
    """Return the size of config.json that these tensors cannot have, or an empty string.

    ``lost`` is how many tensors there are besides, of which nothing is known.

    A model of such a size would be built, and a number of blocks with nine digits is never built.
    A size that no module uses may well be larger than all others.
    """
    largest = max((size for each in tensors.values() for size in each.shape), default=1)
    wrapped = is_wrapped(config)
    # A tower has places of its own.
    tables = (
        each
        for name, each in tensors.items()
        if _TABLE.search(name) and not (wrapped and text_name(name) is None)
    )
    rows = [each.shape[0] for each in tables if each.shape]
    sizes = config[TEXT] if wrapped else config
    count = len(tensors) + lost
    limits = {"num_hidden_layers": (count, f"{count} tensors")}
    if not lost:
        most = _MANY * max(largest, count)
        limits |= dict.fromkeys(_SIZES, (most, f"no size above {largest}"))
    if rows:
        limits[_POSITIONS] = max(rows), f"{max(rows)} positions"
    for key, (most, what) in limits.items():
        value = sizes.get(key)
        if type(value) is int and value > most:
            return f"{key}={value}, and the weights have {what}"
    return ""
