"""channels_permuted: the right numbers stand at other channels, or other heads."""

from __future__ import annotations

import torch

from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.values import Values

_ENDS = (":out", ":logits", ":context", "_rotated")
# Fewer tokens cannot tell channels apart; of more channels, all pairs are too many.
_TOKENS, _MOST = 8, 8192
_NAMED = 4
# What a rotary embedding turns, and norms on the way to it.
_TURNED = ("q_proj:out", "k_proj:out", "q_norm:out", "k_norm:out", "q_b_proj:out", "_rotated")


class ChannelsPermuted:
    """Every wrong channel holds what another one of the golden's does."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the candidate's channels are the golden's in another order."""
        own = evidence.values(evidence.local)
        if own is None or not evidence.local.endswith(_ENDS):
            return None
        places = _places(own)
        if places is None:
            return None
        wrong = [at for at, place in enumerate(places) if at != place]
        what, moved = "channel", dict(zip(wrong, (places[at] for at in wrong), strict=True))
        width = evidence.fact("head_dim")
        heads = _heads(places, width) if width else None
        if heads is not None:
            what, moved = "head", {at: place for at, place in enumerate(heads) if at != place}
        named = [f"{at} holds {place}" for at, place in list(moved.items())[:_NAMED]]
        more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
        text = f"{what}s stand in another order: {what} {', '.join(named)}{more}"
        if evidence.local.endswith(_TURNED):
            text += _pairing(places, width, evidence.fact("rotary_dim", width))
        reasons = [f"all {len(wrong)} wrong channels are other ones of the golden's, to rounding"]
        return Cause("channels_permuted", text, reasons, grade=SHOWN)


def _places(own: Values) -> list[int] | None:
    """Return which of the golden's channels each of the candidate's is, where all are some one."""
    golden, candidate = own.golden.flatten(1).T, own.candidate.flatten(1).T
    if golden.shape[1] < _TOKENS or golden.shape != candidate.shape or len(golden) > _MOST:
        return None
    if not bool(candidate.isfinite().all()):
        return None
    sizes = golden.norm(dim=1).clamp(min=1e-300)
    wrong = ((candidate - golden).norm(dim=1) > own.limit * sizes).nonzero().flatten()
    if len(wrong) < 2:
        return None
    distances = torch.cdist(candidate[wrong], golden) / sizes
    nearest = distances.min(dim=1)
    places = torch.arange(len(golden))
    places[wrong] = nearest.indices
    # Each of them once, and found.
    if not bool((nearest.values <= own.limit).all()) or len(set(places.tolist())) < len(places):
        return None
    return [int(place) for place in places]


def _heads(places: list[int], width: int) -> list[int] | None:
    """Return which head each head is, where whole heads moved; else None."""
    if len(places) % width or len(places) == width:
        return None
    heads = [places[start] // width for start in range(0, len(places), width)]
    whole = [head * width + at for head in heads for at in range(width)]
    return heads if whole == places else None


def _pairing(places: list[int], width: int, turned: int) -> str:
    """Return that the channels of each head went from neighbours to halves, or back; or nothing.

    A rotary embedding turns the first ``turned`` of a head's ``width`` channels in pairs: channel i
    with its neighbour, or with the one half of them away.
    """
    if not width or len(places) % width or not 4 <= turned <= width:
        return ""
    order = [*range(0, turned, 2), *range(1, turned, 2)]
    back = sorted(range(turned), key=order.__getitem__)
    rest, starts = [*range(turned, width)], range(0, len(places), width)
    ways = ([start + at for start in starts for at in way + rest] for way in (order, back))
    if places not in ways:
        return ""
    return (
        ": the order of interleaved against half-split rotary pairs, as when a converter permutes "
        "the rows of q_proj and k_proj once too often, or not at all"
    )


RULE = ChannelsPermuted()
