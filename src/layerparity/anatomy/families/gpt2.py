"""GPT-2: learned positions are added to the tokens; modules of other names, fused projections."""

from layerparity.anatomy.embedding import Embedding, EmbeddingPart, Reads
from layerparity.anatomy.family import Family, taps_under

NAMES = {"input_layernorm": "ln_1", "self_attn": "attn", "post_attention_layernorm": "ln_2"}
# Its positions are not rotated into them.
_ROTATED = ("self_attn:q_rotated", "self_attn:k_rotated")
WTE_AND_WPE = Embedding((EmbeddingPart("wte", Reads.TOKENS), EmbeddingPart("wpe", Reads.POSITIONS)))

FAMILY = Family(
    "gpt2",
    taps=tuple(tap for tap in taps_under(NAMES) if tap.local not in _ROTATED),
    embedding=WTE_AND_WPE,
)
