"""Llama: dense blocks, no QK norm, full rotary."""

from layerparity.anatomy.family import NORMS_FIRST, TAPS, Family

FAMILY = Family(
    "llama",
    taps=tuple(tap for tap in TAPS if ".gate" not in tap.module and "experts" not in tap.local),
    inputs=NORMS_FIRST,
)
