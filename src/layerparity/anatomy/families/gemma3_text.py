"""Gemma 3, text only: QK norm on heads, a soft cap where the configuration gives one."""

from dataclasses import replace

from layerparity.anatomy.families import gemma2
from layerparity.anatomy.family import SHARED_TAPS

_ON_HEADS = ("self_attn.q_norm", "self_attn.k_norm")

FAMILY = replace(
    gemma2.FAMILY,
    model_type="gemma3_text",
    attention=None,
    taps=tuple(replace(tap, heads_first=tap.module in _ON_HEADS) for tap in SHARED_TAPS),
)
