"""Qwen3-MoE: softmax router, QK norm per head, dense blocks among the sparse ones."""

from layerparity.anatomy.family import NORMS_FIRST, TAPS, Family

FAMILY = Family("qwen3_moe", taps=TAPS, inputs=NORMS_FIRST)
