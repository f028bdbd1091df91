"""Llama 4, text only: a router without indices, whose logits are its second output."""

from layerparity.anatomy.family import EXPERTS, SHARED_TAPS, Family, Tap

FAMILY = Family(
    "llama4_text",
    taps=(*SHARED_TAPS, Tap("mlp.gate:logits", "feed_forward.router", EXPERTS, pick=1)),
)
