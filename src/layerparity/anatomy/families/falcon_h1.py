"""Falcon-H1: attention and a mamba mixer side by side, multiplied embedding and logits."""

from layerparity.anatomy.family import Family

FAMILY = Family(
    "falcon_h1",
    after={
        "embed_tokens": lambda value, config: value * config.embedding_multiplier,
        "lm_head": lambda value, config: value * config.lm_head_multiplier,
    },
)
