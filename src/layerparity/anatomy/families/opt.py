"""OPT: learned positions from the third row on; in some checkpoints a projection before them."""

from __future__ import annotations

from typing import Any

from layerparity.anatomy.embedding import Embedding, EmbeddingPart, Reads
from layerparity.anatomy.family import Family, taps_under

NAMES = {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"}
# Its positions are not rotated into them.
_ROTATED = ("self_attn:q_rotated", "self_attn:k_rotated")


def _rows(table: Any, position_ids: Any) -> Any:
    """Return the rows of positions, int64 [batch, token]; the table adds its offset of 2 itself."""
    return table(None, position_ids=position_ids)


FAMILY = Family(
    "opt",
    taps=tuple(tap for tap in taps_under(NAMES) if tap.local not in _ROTATED),
    embedding=Embedding(
        (
            EmbeddingPart("embed_tokens", Reads.TOKENS),
            EmbeddingPart("project_in", optional=True),
            EmbeddingPart("embed_positions", Reads.POSITIONS, call=_rows),
        )
    ),
)
