"""Whether one head, channel or expert of a site is wrong and all others are right to rounding."""

from __future__ import annotations

import torch

from layerparity.ground.numeral import percent
from layerparity.mistakes.block import CHOICES
from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.routers import GATES

# Beside one that is wrong, another may be off by this part of its error at most.
_OTHERS = 0.05
# Of a wrong head, at least so many channels are wrong.
_MOST_CHANNELS = 0.75
# Where heads are channels in a row, by the end of the address.
_BY_HEAD = ("q_proj:out", "k_proj:out", "v_proj:out", "q_norm:out", "k_norm:out")
Seen = tuple[str, list[str]]


def alone(evidence: Evidence, group: str) -> Seen | None:
    """Return which head or channel is wrong alone, as `` (head 3)``, and the reasons; or None."""
    own = evidence.values(evidence.local)
    # A router's numbers belong to no channels.
    if own is None or evidence.component in GATES:
        return None
    off, size = own.candidate - own.golden, own.golden
    channels = off
    if group == "head":
        width = evidence.fact("head_dim")
        if off.dim() == 2 and evidence.local.endswith(_BY_HEAD) and width:
            if off.shape[-1] % width:
                return None
            off, size = off.unflatten(-1, (-1, width)), size.unflatten(-1, (-1, width))
        if off.dim() != 3:
            return None
        channels, off, size = off, off.norm(dim=-1), size.norm(dim=-1)
    errors, sizes = off.flatten(1).norm(dim=0), size.flatten(1).norm(dim=0)
    seen = _one(errors, sizes, own.limit, group)
    if seen is None or group == "channel":
        return seen
    worst = int(errors.argmax())
    if len(errors) == 2 and not bool(own.candidate.reshape(channels.shape)[:, worst].any()):
        # One of two that gives nothing is as well half of a weight that was lost.
        return None
    # Where a few of its channels are wrong, they are, and not the head.
    inside = channels[:, worst].norm(dim=0)
    most = bool((inside > _OTHERS * inside.max()).double().mean() >= _MOST_CHANNELS)
    return seen if most else None


def _one(errors: torch.Tensor, sizes: torch.Tensor, limit: float, group: str) -> Seen | None:
    """Return the one of several groups whose error, of its size, no other has a part of."""
    relative = errors / sizes.clamp(min=1e-300)
    worst = int(errors.argmax())
    others = torch.arange(len(errors)) != worst
    if len(errors) < 2 or not bool(errors.isfinite().all()) or float(relative[worst]) < 2 * limit:
        return None
    right = bool((errors[others] <= max(_OTHERS * float(errors[worst]), 0.0)).all())
    if not right or bool((relative[others] > limit).any()):
        return None
    which = f" ({group} {worst})"
    off = percent(float(relative[worst]))
    return which, [f"{group} {worst} of {len(errors)} is off by {off}, all others are right"]


def expert_alone(evidence: Evidence) -> Seen | None:
    """Return which expert is wrong alone and the reasons: its tokens are off, and no others."""
    own, choices = evidence.values(evidence.local), evidence.values(CHOICES)
    if own is None or choices is None or len(own.golden) != len(choices.golden):
        return None
    chosen = choices.candidate.long()
    if bool((chosen.sort(-1).values != choices.golden.long().sort(-1).values).any()):
        return None
    errors = (own.candidate - own.golden).flatten(1).norm(dim=1)
    wrong = errors > own.limit * own.golden.flatten(1).norm(dim=1)
    count = int(wrong.sum())
    if not 2 <= count < len(wrong):
        return None
    guilty = []
    for expert in range(int(chosen.max()) + 1):
        routed = (chosen == expert).any(-1)
        if bool((routed == wrong).all()):
            guilty.append(expert)
    if len(guilty) != 1:
        return None
    reasons = [f"the {count} tokens of expert {guilty[0]} are wrong, and no others are"]
    return f" (expert {guilty[0]})", reasons
