"""Granite: Llama with a multiplied embedding and divided logits."""

from layerparity.anatomy.family import Family

FAMILY = Family(
    "granite",
    after={
        "embed_tokens": lambda value, config: value * config.embedding_multiplier,
        "lm_head": lambda value, config: value / config.logits_scaling,
    },
)
