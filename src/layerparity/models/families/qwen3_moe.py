"""Qwen3-MoE: softmax router, QK norm per head, dense blocks among the sparse ones."""

from layerparity.models.families.base import Family

FAMILY = Family("qwen3_moe")
