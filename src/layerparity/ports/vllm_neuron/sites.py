"""Where modules of a vLLM Neuron block show the canonical sites, and the reasons for all others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import distributed as dist

from layerparity.anatomy.family import CHOICES, EXPERTS, HIDDEN, ROUTED, Tap
from layerparity.anatomy.site import SiteSpec
from layerparity.numbers.rank_parts import TERM, WHOLE, RankShare
from layerparity.ports.observed.watched import Watched
from layerparity.ports.vllm_neuron.passes import TokenPass

_EXPERTS = "mlp.experts:out"
SPECS: dict[str, SiteSpec] = {
    "mlp.gate:logits": EXPERTS,
    ROUTED: CHOICES,
}
# What is computed by functions that take several steps at once, and which.
_FUSED = {
    **dict.fromkeys(
        [f"self_attn.{each}_proj:out" for each in "qkv"], "its QKV projection is fused"
    ),
    **dict.fromkeys(
        ["self_attn:q_rotated", "self_attn:k_rotated"], "rotary is part of the QKV projection"
    ),
    "self_attn:context": "attention and its output projection are one",
}


# What the plugin's models call a module of a block, by its canonical name; the first counts.
_NAMES: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("input_layernorm",),
    "self_attn": ("self_attn",),
    "post_attention_layernorm": (
        "post_attention_layernorm",
        "mlp.post_attention_layernorm",
        "mlp.experts.post_attention_layernorm",
    ),
    "mlp": ("mlp",),
    "mlp.gate": ("mlp.gate", "mlp.router"),
    "mlp.experts": ("mlp.experts",),
}


@dataclass
class BlockWatched(Watched):
    """What the modules of one call of a block showed."""

    known = _NAMES

    def canonical(self) -> dict[str, torch.Tensor]:
        """Return what was seen that means what the sites mean.

        A module that norms by itself is fed what is not normed yet.
        """
        found = dict(self.seen)
        if "input_layernorm:out" not in found:
            found.pop("self_attn:in", None)
        norm = self.module("post_attention_layernorm")
        outside = norm is not None and norm in self.block.children()
        if not outside or "post_attention_layernorm:out" not in found:
            found.pop("mlp:in", None)
        experts = self.module("mlp.experts")
        if norm is not None and experts is not None and norm in experts.modules():
            # They are the whole MLP, by another name.
            found.pop(_EXPERTS, None)
        return found


def unseen(tap: Tap, stored: Collection[str]) -> str:
    """Return why a site of a block of these ``stored`` tensors is not shown."""
    # A router's weights and choices follow from its logits.
    names = _NAMES.get(tap.module, (tap.module,))
    if tap.attention is None and not any(
        f".{own}." in f".{name}" for own in names for name in stored
    ):
        return f"the checkpoint's block has no {tap.module}"
    why = f" ({_FUSED[tap.local]})" if tap.local in _FUSED else ""
    return f"the model computes it within a function{why}, so no hook sees it"


@dataclass
class SiteParts:
    """What one site showed in all passes of a call: [batch, token, ...] of this rank.

    ``ranks`` share a prompt's tokens; ``width`` is that of hidden states that are not padded.
    """

    local: str
    batch: int
    tokens: int
    rank: int
    ranks: int
    width: int
    whole: torch.Tensor | None = None
    shares: bool = field(default=False, init=False)
    odd: bool = field(default=False, init=False)

    @property
    def spec(self) -> SiteSpec:
        """The site's axes."""
        return SPECS.get(self.local, HIDDEN)

    def add(self, fed: TokenPass, value: torch.Tensor) -> None:
        """Take what a pass showed: of all its tokens, or of this rank's slice of them."""
        part = value.reshape(-1, value.shape[-1])
        if self.spec is HIDDEN:
            part = part[:, : self.width]
        own = fed.tokens // self.ranks
        if len(part) not in (fed.tokens, own):
            self.odd = True
            return
        if self.whole is None:
            self.whole = part.new_zeros(self.batch, self.tokens, part.shape[-1])
        sliced = len(part) != fed.tokens
        self.shares |= sliced
        fed.put(self.whole, part, self.rank * own if sliced else 0)

    def share(self) -> RankShare:
        """Return which part of the whole this rank has; of what is called by all ranks alike."""
        terms = self.shares
        if self.local == _EXPERTS and self.whole is not None and not terms:
            # Whether their sum is taken behind or within them only the numbers tell.
            least, most = self.whole.clone(), self.whole.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            terms = not torch.equal(least, most)
        return TERM if terms else WHOLE
