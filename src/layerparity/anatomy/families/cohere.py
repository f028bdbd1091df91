"""Cohere: attention and MLP side by side after one norm, scaled logits."""

from layerparity.anatomy.block import PARALLEL
from layerparity.anatomy.family import Family

FAMILY = Family(
    "cohere",
    block=PARALLEL,
    after={"lm_head": lambda value, config: value * config.logit_scale},
)
