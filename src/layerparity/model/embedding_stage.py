"""The stage of an embedding of several modules: they run in turn, as the decoder runs them."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.embedding import Embedding, Reads


class EmbeddingStage(nn.Module):
    """A decoder's own modules, in the order in which they run.

    ``parts`` are those of them that the decoder has, ``per_layer`` what makes of them what blocks
    take beside their state, or None; blocks call it what the stage ``hands`` on.
    """

    def __init__(self, decoder: nn.Module, embedding: Embedding) -> None:
        super().__init__()
        children = dict(decoder.named_children())
        self.parts = tuple(part for part in embedding.parts if part.module in children)
        beside = any(part.beside for part in self.parts)
        self.per_layer = embedding.per_layer if beside else None
        self.hands = embedding.per_layer_name if beside else ""
        self.config = decoder.config
        for part in self.parts:
            self.add_module(part.module, children[part.module])

    @property
    def modules_in_order(self) -> list[nn.Module]:
        """The modules, the tokens' table first."""
        return [self.get_submodule(part.module) for part in self.parts]

    @property
    def of_the_state(self) -> list[nn.Module]:
        """Those of the modules that make what the first block is fed."""
        every = zip(self.parts, self.modules_in_order, strict=True)
        return [module for part, module in every if not part.beside]

    def forward(
        self, ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return what the first block is fed, floating [batch, token, channel].

        ``ids`` and ``position_ids`` are int64 [batch, token]. With it comes what each block takes
        beside it, floating [batch, token, layer, channel], where blocks do.
        """
        state = ids
        for part, module in zip(self.parts, self.modules_in_order, strict=True):
            if part.beside:
                continue
            if part.reads is Reads.POSITIONS:
                call = part.call
                rows = module(position_ids) if call is None else call(module, position_ids)
                state = state + rows
            else:
                state = module(state)
        if self.per_layer is None:
            return state
        modules = dict(self.named_children())
        return state, self.per_layer(modules, ids, state, self.config)
