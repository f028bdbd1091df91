"""Where NxDI's modules show the canonical sites, and which part of each one rank holds.

The part follows from weights: see `layerparity.ports.ranks.channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerparity.anatomy.family import CHOICES, EXPERTS, HEADS, HIDDEN, ROUTED
from layerparity.anatomy.site import SiteSpec
from layerparity.numbers.rank_parts import TERM, WHOLE, PartKind, RankShare
from layerparity.ports.nxdi import weighing
from layerparity.ports.observed.watched import SEEN, Watched, element
from layerparity.ports.ranks.channels import by_head

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
        headed = value.dim() == 4
        # Attention reads heads before tokens; where both are as many, only the site tells.
        if (headed and value.shape[1] != self.tokens) or (headed and local in _ROTATED):
            value = value.transpose(1, 2)
        flat = value.reshape(self.batch, self.tokens, -1)
        if flat.shape[-1] != len(channels):
            return None
        if headed or local == "self_attn:context":
            values, share = by_head(flat, channels, self.head_dim)
            return Shown(values, HEADS, share)
        return Shown(flat, HIDDEN, RankShare(PartKind.SHARDED, 2, tuple(channels.tolist())))


def weights_of(choices: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Return what weighs the chosen experts, [..., k], of what weighs all, [..., expert]."""
    return masked.gather(-1, choices)
