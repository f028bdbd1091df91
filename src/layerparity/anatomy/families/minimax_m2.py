"""MiniMax-M2: sigmoid router with a correction bias, QK norm over all heads, partial rotary."""

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.family import TAPS, Family

# Real correction biases stand near 8.5, where bf16 has steps of 0.0625: rounding them changes the
# expert set of a fifth or more of the tokens.
FAMILY = Family(
    "minimax_m2",
    taps=TAPS,
    float32_patterns=("*.e_score_correction_bias",),
    block=SERIAL,
    complete=True,
)
