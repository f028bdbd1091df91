"""The stage of an embedding of several modules: they run in turn, as the decoder runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from layerparity.anatomy.embedding import EmbeddingPart, Reads


class EmbeddingStage(nn.Module):
    """A decoder's own modules, in the order in which they run.

    ``parts`` are those of them that the decoder has.
    """

    def __init__(self, decoder: nn.Module, parts: Sequence[EmbeddingPart]) -> None:
        super().__init__()
        children = dict(decoder.named_children())
        self.parts = tuple(part for part in parts if part.module in children)
        for part in self.parts:
            self.add_module(part.module, children[part.module])

    @property
    def modules_in_order(self) -> list[nn.Module]:
        """The modules, the tokens' table first."""
        return [self.get_submodule(part.module) for part in self.parts]

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return what the first block is fed, floating [batch, token, channel].

        ``ids`` and ``position_ids`` are int64 [batch, token].
        """
        state = ids
        for part, module in zip(self.parts, self.modules_in_order, strict=True):
            if part.reads is Reads.POSITIONS:
                call = part.call
                rows = module(position_ids) if call is None else call(module, position_ids)
                state = state + rows
            else:
                state = module(state)
        return state
