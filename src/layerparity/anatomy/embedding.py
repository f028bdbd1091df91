"""Embedding: the modules that make of token ids what the first block is fed, where one is not all.

Most models copy rows of one table. Others add learned positions, project or norm before their
first block: such a family names the modules, and each is a site of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from layerparity.anatomy.block import RESIDUAL, Block, Node
from layerparity.anatomy.site import EMBEDDING, Kind, SiteSpec

_AXES = ("batch", "token", "channel")
_OUT = f"{EMBEDDING}:out"


class Reads(StrEnum):
    """What a module of the embedding is called with, and what becomes of its output.

    The rows of ``tokens`` come first; rows of ``positions`` are added to what there is by then; of
    what goes on (``state``) a module makes something else.
    """

    TOKENS = "tokens"
    POSITIONS = "positions"
    STATE = "state"


@dataclass(frozen=True)
class EmbeddingPart:
    """One module of the embedding: ``module`` is its name in the decoder.

    ``call(module, position_ids)`` is how a table of positions is read that is called with more than
    position ids, int64 [batch, token]. Not every model of a family has an ``optional`` part.
    """

    module: str
    reads: Reads = Reads.STATE
    call: Callable[[Any, Any], Any] | None = None
    optional: bool = False

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
        return SiteSpec(_AXES, Kind.REAL if self.reads is Reads.STATE else Kind.EXACT)


@dataclass(frozen=True)
class Embedding:
    """The modules of an embedding in the order in which they run, the tokens' first."""

    parts: tuple[EmbeddingPart, ...]

    @cached_property
    def block(self) -> Block:
        """What is computed from what, from the ids on, as the sites of the stage call it."""
        state: tuple[str, ...] = (f"{EMBEDDING}:in",)
        nodes = []
        for part in self.parts:
            # No site shows the positions that a table is read at.
            fed = () if part.reads is Reads.POSITIONS else state
            nodes.append(Node(part.local, fed, part.path, optional=part.optional))
            state = (*state, part.local) if part.reads is Reads.POSITIONS else (part.local,)
        added = RESIDUAL if len(state) > 1 else ""
        nodes.append(Node(_OUT, state, EMBEDDING, added, copies=not added))
        return Block(tuple(nodes))
