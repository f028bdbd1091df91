"""What a wrong RMSNorm over query or key heads looks like, for the rules that tell them apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.shape import blocks_of, finite

# A factor that changes from token to token leaves a z of a hundred or two; a constant thousands.
CERTAIN = 1000.0
# A share of variance from which on heads, not channels, are what differs.
BY_HEAD = 0.6
NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class QkNorm:
    """A failing q_norm or k_norm.

    ``between`` is the share of its channel slopes' variance that lies between heads, 0 to 1, None
    where slopes are not known; ``constant`` whether its channels are off by constants: their slopes
    are beyond doubt, None where not known; ``ratio`` its norm over the golden's.
    """

    site: str
    between: float | None
    constant: bool | None
    ratio: float | None


def qk_norm(evidence: Evidence) -> QkNorm | None:
    """Return what is known of a failing q_norm or k_norm whose input passes, or None."""
    if evidence.component not in NORMS:
        return None
    query = evidence.component.endswith("q_norm")
    heads = evidence.fact("num_attention_heads" if query else "num_key_value_heads")
    certain = evidence.metric("slope_channel_z")
    constant = None if certain is None else abs(certain) > CERTAIN
    between = between_heads(evidence.profile("channel"), heads)
    return QkNorm(evidence.local, between, constant, evidence.metric("norm_ratio"))


def between_heads(slopes: Sequence[float], heads: int) -> float | None:
    """Return the share of the channel slopes' variance that lies between heads; None if unknown."""
    values = finite(slopes)
    groups = blocks_of(values, heads)
    total = statistics.pvariance(values) if len(values) > 1 else 0.0
    if heads < 2 or not groups or not total:
        return None
    return statistics.pvariance([statistics.fmean(group) for group in groups]) / total
