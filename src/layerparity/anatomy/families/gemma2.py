"""Gemma 2: norms before and after attention and MLP, logits under a soft cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerparity.anatomy.block import SANDWICH
from layerparity.anatomy.family import Family

if TYPE_CHECKING:
    import torch


def soft_cap(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return cap * tanh(logits / cap), as Gemma 2 (arXiv 2408.00118, section 2) defines it.

    ``logits`` are floating [batch, token, vocabulary]; so is what is returned.
    """
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


# The scores are capped too, which sdpa cannot do.
FAMILY = Family("gemma2", block=SANDWICH, after={"lm_head": soft_cap}, attention="eager")
