"""Which channels and heads of the whole one rank computes, whatever its converter made of weights.

The part follows from weights: which rows of q_proj's weight a rank has says which channels and
heads it computes, whatever was padded, replicated or permuted on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from layerparity.model.element_origins import ElementOrigin
from layerparity.numbers.rank_parts import PartKind, RankShare


@dataclass(frozen=True)
class RankHeads:
    """How many heads of queries, and of keys, a rank has, and how many channels each of them."""

    heads: int
    keys: int
    size: int


def by_head(
    flat: torch.Tensor, channels: torch.Tensor, size: int
) -> tuple[torch.Tensor, RankShare]:
    """Return [batch, token, head, channel] of [batch, token, channel], and which heads they are.

    ``channels`` say where each stands in the whole, int64 [channel], -1 for padding; ``size`` of
    them are a head, and stand in it in canonical order afterwards.
    """
    places = channels.reshape(-1, size)
    values = flat.unflatten(-1, (-1, size))
    # A converter may permute the channels of a head; padding has no order.
    order = torch.where(places >= 0, places % size, torch.arange(size))
    values = values.gather(-1, order.argsort(-1).expand(values.shape))
    heads = torch.where(places[:, 0] >= 0, places[:, 0] // size, -1)
    return values, RankShare(PartKind.SHARDED, 2, tuple(heads.tolist()))


def channels_of(
    origins: Mapping[str, ElementOrigin],
    shapes: Mapping[str, torch.Size],
    own: RankHeads,
    sharing: int,
) -> dict[str, torch.Tensor]:
    """Return where this rank's channels stand in the whole, int64 [channel], by projection.

    ``origins`` are those of the rank's parameters, ``shapes`` those of the stored tensors; the rank
    has its ``own`` heads, and ``sharing`` heads of the model have one head of keys. A rank may have
    nothing but padded heads.
    """
    size, heads, keys = own.size, own.heads, own.keys
    counts = {"q_proj": heads, "k_proj": keys, "v_proj": keys, "o_proj": heads}
    found = {name: torch.full((count * size,), -1) for name, count in counts.items()}
    # The projection behind attention comes first: of others that are stored as one, its channels
    # tell the heads.
    for name, axis in (("o_proj", 1), ("q_proj", 0), ("k_proj", 0), ("v_proj", 0)):
        for parameter, origin in origins.items():
            number = next((n for n in origin.held if _is_of(name, origin.names[n])), None)
            fused = number is None and f".{name}." in f".{parameter}" and len(origin.held) == 1
            if fused:
                number = origin.held[0]
            if number is None or origin.name.dim() != 2:
                continue
            channels = _along(origin, number, shapes[origin.names[number]], axis)
            if channels is None or (fused and len(channels) != len(found[name])):
                continue
            if fused and name != "o_proj":
                channels = _by_heads(channels, found["o_proj"], size, counts[name], sharing)
            found[name] = channels
    return found


def _is_of(projection: str, stored: str) -> bool:
    return stored.endswith(f".{projection}.weight") and "attn" in stored.rsplit(".", 3)[-3]


def _by_heads(
    rows: torch.Tensor, context: torch.Tensor, size: int, count: int, sharing: int
) -> torch.Tensor:
    """Return where channels of queries, keys or values stand, of rows of one stored matrix of all.

    ``rows`` are int64 [channel], -1 for padding, ``context`` is where the channels behind attention
    stand: queries have the same heads, and the heads that share keys stand beside each other.
    Within a head rows stand as its channels do, wherever in the matrix it begins.
    """
    heads = torch.where(context >= 0, context // size, -1).reshape(-1, size)[:, 0]
    if count < len(heads):
        # Of a group some may be padding.
        heads = heads.reshape(count, -1).amax(1)
        heads = torch.where(heads >= 0, heads // sharing, -1)
    whole = heads.repeat_interleave(size)
    return torch.where((rows >= 0) & (whole >= 0), whole * size + rows % size, -1)


def _along(origin: ElementOrigin, number: int, shape: torch.Size, axis: int) -> torch.Tensor | None:
    """Return the places along an axis of a stored matrix that a parameter's own axis holds."""
    own = origin.name == number
    places = origin.place // shape[1] if axis == 0 else origin.place % shape[1]
    places = torch.where(own, places, -1)
    # The second is for a matrix that the converter has transposed.
    for dim in (axis, 1 - axis):
        lines = places.movedim(dim, 0)
        # Padding is -1, so the largest is a line's own place.
        largest = lines.max(1).values
        same = (lines == largest[:, None]) | (lines < 0)
        if not bool(same.all()):
            continue
        if len(origin.stored) > 1:
            # Several projections are fused: the lines of this one, and the padding among them.
            held = own.movedim(dim, 0).any(1).nonzero().flatten()
            foreign = ((origin.name >= 0) & ~own).movedim(dim, 0).any(1)
            first, last = int(held[0]), int(held[-1])
            keep = ~foreign
            keep[:first], keep[last + 1 :] = False, False
            return largest[keep]
        return largest
    return None
