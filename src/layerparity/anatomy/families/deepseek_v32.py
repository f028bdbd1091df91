"""DeepSeek-V3.2: an indexer scores all tokens for each token, and attention sees the best alone."""

from layerparity.anatomy.family import ATTENDED, CHOSEN_TOKENS, SHARED_TAPS, Family, Tap

FAMILY = Family(
    "deepseek_v32",
    taps=(*SHARED_TAPS, Tap(ATTENDED, "self_attn.indexer", CHOSEN_TOKENS)),
)
