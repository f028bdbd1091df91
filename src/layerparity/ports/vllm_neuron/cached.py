"""What attention reads of a paged cache: rotated keys, which no hook within a kernel sees.

Values are none of what the sites say: attention reads them here, and `v_proj` is what made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerparity.anatomy.family import HEADS
from layerparity.anatomy.sizes import ModelSizes
from layerparity.ports.base import Call
from layerparity.ports.ranks.channels import RankHeads, by_head, channels_of
from layerparity.ports.ranks.side import Cached, RankObserved
from layerparity.ports.ranks.stage_weights import StageWeights
from layerparity.ports.vllm_neuron.library import LayerSpec
from layerparity.ports.vllm_neuron.passes import Pages

KEYS = "self_attn:k_rotated"


@dataclass(frozen=True)
class CachedParts:
    """A block's keys and values on one rank, where requests find them in the paged cache.

    ``cache`` are those of all blocks of slots, [block, KV head, token in block, channel].
    """

    pages: Pages
    spec: LayerSpec
    cache: Sequence[torch.Tensor]
    weights: StageWeights
    sizes: ModelSizes

    def rows(self, cached: torch.Tensor, call: Call, tokens: int) -> torch.Tensor:
        """Return what is ``cached`` of the last ``tokens`` that were seen, [batch, token, channel].

        Padding is zeros. The channels are those of this rank's heads.
        """
        mask = call.attention_mask.bool()
        held = cached.transpose(1, 2).flatten(0, 1).flatten(1)
        whole = held.new_zeros(*mask.shape, held.shape[-1])
        for row, real in enumerate(mask):
            places = torch.arange(int(real.sum()))
            whole[row, real] = held[self.pages.slots(torch.full_like(places, row), places)]
        return whole[:, mask.shape[1] - tokens :]

    def show(self, observed: RankObserved, call: Call) -> None:
        """Put the keys of a pass's tokens among what a rank observed, in canonical layout."""
        keys = self.cache[0]
        if keys.dtype != observed.output.dtype:
            why = f"it is cached in {str(keys.dtype).removeprefix('torch.')}"
            observed.unseen[KEYS] = why
            return
        shown = self.held(call, call.tokens).get("keys")
        if shown is not None:
            observed.unseen.pop(KEYS, None)
            observed.specs[KEYS] = HEADS
            observed.tensors[KEYS], observed.shares[KEYS] = shown

    def held(self, call: Call, tokens: int) -> Cached:
        """Return keys and values of the last ``tokens`` that were seen, and whose heads they are.

        They are [batch, token, head, channel], the channels of a head in canonical order.
        """
        spec, sharing = self.spec, self.sizes.heads // self.sizes.kv_heads
        heads = RankHeads(spec.num_kv_heads * sharing, spec.num_kv_heads, spec.head_size)
        channels = channels_of(self.weights.origins, self.weights.shapes, heads, sharing)
        found: Cached = {}
        for name, each in zip(("keys", "values"), self.cache, strict=True):
            if not any(f".{name[0]}_proj." in stored for stored in self.weights.shapes):
                # Of what is stored as one with others, nothing says whose channels these are.
                continue
            own, rows = channels[f"{name[0]}_proj"], self.rows(each, call, tokens)
            if len(own) == rows.shape[-1]:
                found[name] = by_head(rows, own, spec.head_size)
        return found
