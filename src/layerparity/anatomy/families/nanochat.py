"""nanochat: a norm without weights before the first block too, logits under a soft cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerparity.anatomy.families.gemma2 import soft_cap
from layerparity.anatomy.family import Family

if TYPE_CHECKING:
    import torch


def _norm(hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """Return [batch, token, channel] of a root mean square of 1, in its dtype."""
    mean = hidden.pow(2).mean(-1, keepdim=True)
    scale: torch.Tensor = (mean + config.rms_norm_eps).rsqrt()
    return hidden * scale


FAMILY = Family("nanochat", after={"embed_tokens": _norm, "lm_head": soft_cap})
