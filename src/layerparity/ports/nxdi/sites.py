"""Where NxDI's modules show the canonical sites, and which part of each one rank holds.

The part follows from weights: which rows of q_proj's weight a rank has says which channels and
heads it computes, whatever was padded, replicated or permuted on the way. See `converter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerparity.anatomy.family import CHOICES, EXPERTS, HEADS, HIDDEN, ROUTED
from layerparity.anatomy.site import SiteSpec
from layerparity.model.element_origins import ElementOrigin
from layerparity.numbers.rank_parts import TERM, WHOLE, PartKind, RankShare
from layerparity.ports.nxdi import weighing
from layerparity.ports.observed.watched import SEEN, Watched, element

_MLPS = ("mlp", "block_sparse_moe", "feed_forward", "moe", "ffn")
# What NxDI's models call a module of a block, by its canonical name; the first that exists counts.
NAMES: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("input_layernorm",),
    "self_attn": ("self_attn", "attention", "attn"),
    "self_attn.qkv": ("self_attn.qkv_proj", "attention.qkv_proj", "attn.qkv_proj"),
    "self_attn.q_norm": ("self_attn.q_norm", "self_attn.q_layernorm"),
    "self_attn.k_norm": ("self_attn.k_norm", "self_attn.k_layernorm"),
    "self_attn.o_proj": ("self_attn.o_proj", "attention.o_proj", "attn.o_proj"),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "mlp": _MLPS,
    "mlp.gate": tuple(f"{each}.router" for each in _MLPS),
    "mlp.experts": tuple(f"{each}.expert_mlps" for each in _MLPS),
}
# The method of NxDI's attention that returns queries, keys and values as attention reads them, and
# the one of its experts that returns what weighs each expert's output.
_PREPARED = "prep_qkv_tensors"
_WEIGHED = "get_expert_affinities_masked"


_ROTATED = {"self_attn:q_rotated": 0, "self_attn:k_rotated": 1}
_WEIGHTS = "mlp.gate:weights"
_KNOWN = {*(each.local for each in SEEN), *_ROTATED, _WEIGHTS}
# The projection whose rows (or columns, of o_proj) say which channels a site holds on this rank.
_PROJECTIONS = {
    "self_attn.q_proj:out": ("q_proj", 0),
    "self_attn.k_proj:out": ("k_proj", 0),
    "self_attn.v_proj:out": ("v_proj", 0),
    "self_attn.q_norm:out": ("q_proj", 0),
    "self_attn.k_norm:out": ("k_proj", 0),
    "self_attn:q_rotated": ("q_proj", 0),
    "self_attn:k_rotated": ("k_proj", 0),
    "self_attn:context": ("o_proj", 1),
}
_SPECS: dict[str, SiteSpec] = {
    "self_attn:q_rotated": HEADS,
    "self_attn:k_rotated": HEADS,
    "self_attn:context": HEADS,
    "mlp.gate:logits": EXPERTS,
    ROUTED: CHOICES,
    _WEIGHTS: EXPERTS,
}


@dataclass
class NxdiWatched(Watched):
    """What one call of an NxDI block showed, also what its methods return that no hook sees."""

    known = NAMES

    def hook(self, stack: ExitStack) -> None:
        """Note what passes the block's modules and methods until the stack is left."""
        super().hook(stack)
        attention, experts = self.module("self_attn"), self.module("mlp.experts")
        # Rotated queries and keys are no module's output, so no hook sees them.
        if hasattr(attention, _PREPARED):
            stack.enter_context(_wrapped(attention, _PREPARED, self._note_rotated))
        if hasattr(experts, _WEIGHED):
            stack.enter_context(_wrapped(experts, _WEIGHED, self._note_weights))
        if experts is not None and hasattr(experts, weighing.METHOD):
            stack.enter_context(weighing.weights_noted(experts, self._note_weights))

    def _note_rotated(self, prepared: Any) -> None:
        for local, place in _ROTATED.items():
            self.note(local, element(prepared, place))

    def _note_weights(self, weights: Any) -> None:
        self.note(_WEIGHTS, weights)


@contextmanager
def _wrapped(owner: Any, method: str, note: Callable[[Any], None]) -> Iterator[None]:
    """Show what a method of a module returns while the block runs."""
    plain = getattr(owner, method)

    def call(*args: Any, **named: Any) -> Any:
        result = plain(*args, **named)
        note(result)
        return result

    # On the object: to delete it there shows the class's own method again.
    object.__setattr__(owner, method, call)
    try:
        yield
    finally:
        object.__delattr__(owner, method)


@dataclass(frozen=True)
class Shown:
    """One site in canonical layout, on this rank: [batch, token, ...]."""

    value: torch.Tensor
    spec: SiteSpec
    share: RankShare = WHOLE


@dataclass(frozen=True)
class RankLayout:
    """What is known of a rank's tensors: the batch, head size, and where its channels stand.

    ``channels`` are by projection the places of its own channels in the whole, -1 for padding.
    ``partial`` says whether experts' outputs are terms of a sum over the ranks; ``parts`` is how
    many ranks share the tokens between the layers (sequence parallelism), of which this is one.
    ``width`` is that of the model's hidden states.
    """

    batch: int
    tokens: int
    width: int
    head_dim: int
    channels: Mapping[str, torch.Tensor]
    rank: int
    partial: bool
    parts: int = 1

    def canonical(self, local: str, value: torch.Tensor) -> Shown | None:
        """Return a tensor as NxDI gave it at a site in canonical layout; None where it has none."""
        spec = _SPECS.get(local, HIDDEN)
        if local in _PROJECTIONS:
            return self._of_heads(local, value)
        own = self.tokens // self.parts
        if self.parts > 1 and value[..., 0].numel() == self.batch * own:
            # Rows may have been turned, so each rank's tokens stand where they belong already.
            whole = value.new_zeros(self.batch, self.parts, own, value.shape[-1])
            whole[:, self.rank] = value.reshape(self.batch, own, -1)
            return Shown(whole.flatten(1, 2), spec, TERM)
        if value.numel() % (self.batch * self.tokens):
            return None
        if local not in _KNOWN and value.shape[-1] != self.width:
            # Of a module that no port knows, a rank's share has no place in the whole.
            return None
        # NxD adds the ranks' experts up behind them, in the module around.
        share = TERM if local == "mlp.experts:out" and self.partial else WHOLE
        return Shown(value.reshape(self.batch, self.tokens, -1), spec, share)

    def _of_heads(self, local: str, value: torch.Tensor) -> Shown | None:
        name, _ = _PROJECTIONS[local]
        channels = self.channels[name]
        by_head = value.dim() == 4
        # Attention reads heads before tokens; where both are as many, only the site tells.
        if (by_head and value.shape[1] != self.tokens) or (by_head and local in _ROTATED):
            value = value.transpose(1, 2)
        flat = value.reshape(self.batch, self.tokens, -1)
        if flat.shape[-1] != len(channels):
            return None
        if by_head or local == "self_attn:context":
            return self._heads(flat, channels)
        return Shown(flat, HIDDEN, RankShare(PartKind.SHARDED, 2, tuple(channels.tolist())))

    def _heads(self, flat: torch.Tensor, channels: torch.Tensor) -> Shown:
        """Return [batch, token, head, channel], the channels of each head in canonical order."""
        places = channels.reshape(-1, self.head_dim)
        values = flat.unflatten(-1, (-1, self.head_dim))
        # A converter may permute the channels of a head; padding has no order.
        order = torch.where(places >= 0, places % self.head_dim, torch.arange(self.head_dim))
        values = values.gather(-1, order.argsort(-1).expand(values.shape))
        heads = torch.where(places[:, 0] >= 0, places[:, 0] // self.head_dim, -1)
        return Shown(values, HEADS, RankShare(PartKind.SHARDED, 2, tuple(heads.tolist())))


def channels_of(
    origins: Mapping[str, ElementOrigin],
    shapes: Mapping[str, torch.Size],
    attention: Any,
    sharing: int,
) -> dict[str, torch.Tensor]:
    """Return where this rank's channels stand in the whole, int64 [channel], by projection.

    ``origins`` are those of the rank's parameters, ``shapes`` those of the stored tensors;
    ``attention`` knows how many heads the rank has, and ``sharing`` heads of the model have one
    head of keys. A rank may have nothing but padded heads.
    """
    size = int(getattr(attention, "head_dim", 0))
    heads = int(getattr(attention, "num_heads", 0))
    keys = int(getattr(attention, "num_key_value_heads", 0))
    counts = {"q_proj": heads, "k_proj": keys, "v_proj": keys, "o_proj": heads}
    found = {name: torch.full((own * size,), -1) for name, own in counts.items()}
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


def weights_of(choices: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Return what weighs the chosen experts, [..., k], of what weighs all, [..., expert]."""
    return masked.gather(-1, choices)
