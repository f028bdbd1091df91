"""Qwen3-MoE: softmax router, QK norm per head, dense blocks among the sparse ones."""

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.family import TAPS, Family

FAMILY = Family("qwen3_moe", TAPS, SERIAL, complete=True)
