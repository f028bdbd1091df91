"""Embedding: the modules that make of token ids what the first block is fed, where one is not all.

Most models copy rows of one table. Others add learned positions, project or norm before their
first block: such a family names the modules, and each is a site of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.block import RESIDUAL, Block, Node
from layerparity.anatomy.site import EMBEDDING, Kind, SiteSpec

if TYPE_CHECKING:
    import torch

_AXES = ("batch", "token", "channel")
# A block's values stand as a head's do.
_BY_LAYER = ("batch", "token", "head", "channel")
_OUT = f"{EMBEDDING}:out"


class Reads(StrEnum):
    """What a module of the embedding is called with, and what becomes of its output.

    The rows of ``tokens`` come first; rows of ``positions`` are added to what there is by then; of
    what goes on (``state``) a module makes something else, as another of what one ``beside`` made.
    """

    TOKENS = "tokens"
    POSITIONS = "positions"
    STATE = "state"
    BESIDE = "beside"


@dataclass(frozen=True)
class EmbeddingPart:
    """One module of the embedding: ``module`` is its name in the decoder.

    ``call(module, position_ids)`` is how a table of positions is read that is called with more than
    position ids, int64 [batch, token]. Not every model of a family has an ``optional`` part. A
    table that is ``scaled`` rounds its rows. A part that is ``beside`` the state makes what blocks
    take beside it, as the family says (`Embedding.per_layer`): each block's apart, if ``by_layer``.
    """

    module: str
    reads: Reads = Reads.STATE
    call: Callable[[Any, Any], Any] | None = None
    optional: bool = False
    scaled: bool = False
    by_layer: bool = False
    beside: bool = False

    @property
    def path(self) -> str:
        """The module's place in the model: ``embed_tokens.wpe``."""
        return f"{EMBEDDING}.{self.module}"

    @property
    def local(self) -> str:
        """The address of the site that shows what it gives out."""
        return f"{self.path}:out"

    @property
    def spec(self) -> SiteSpec:
        """Axes and kind of what it gives out: a table copies rows, so all but equality is wrong."""
        copies = self.reads in (Reads.TOKENS, Reads.POSITIONS) and not self.scaled
        return SiteSpec(_BY_LAYER if self.by_layer else _AXES, Kind.EXACT if copies else Kind.REAL)


@dataclass(frozen=True)
class Embedding:
    """The modules of an embedding in the order in which they run, the tokens' first.

    ``per_layer(modules, ids, state, config)`` makes of the modules by name, ids int64 [batch,
    token], and the state [batch, token, channel] what each block takes beside its state, floating
    [batch, token, layer, channel]. A block's forward calls its slice ``per_layer_name``.
    """

    parts: tuple[EmbeddingPart, ...]
    per_layer: Callable[..., torch.Tensor] | None = None
    per_layer_name: str = ""

    @cached_property
    def block(self) -> Block:
        """What is computed from what, from the ids on, as the sites of the stage call it."""
        state: tuple[str, ...] = (f"{EMBEDDING}:in",)
        beside: tuple[str, ...] = ()
        nodes: list[Node] = []
        for part in self.parts:
            if part.beside:
                tokens = (f"{EMBEDDING}:in",)
                fed = {Reads.TOKENS: tokens, Reads.BESIDE: beside}.get(part.reads, state)
                nodes.append(Node(part.local, fed, part.path, optional=part.optional))
                beside = (part.local,)
                continue
            # No site shows the positions that a table is read at.
            fed = () if part.reads is Reads.POSITIONS else state
            nodes.append(Node(part.local, fed, part.path, optional=part.optional))
            state = (*state, part.local) if part.reads is Reads.POSITIONS else (part.local,)
        added = RESIDUAL if len(state) > 1 else ""
        nodes.append(Node(_OUT, state, EMBEDDING, added, copies=not added))
        return Block(tuple(nodes))
