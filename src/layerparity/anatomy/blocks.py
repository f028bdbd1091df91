"""Blocks: the structure of every block of a model, and the order of all its sites."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from layerparity.anatomy.block import Block, ordered
from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import EMBEDDING, Place, Site


@dataclass(frozen=True)
class BlockKind:
    """The structure that some layers of a model share."""

    layers: tuple[int, ...]
    block: Block


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model by layer; ``usual`` stands for those that nobody measured.

    ``embedding`` is the structure of an embedding of several modules.
    """

    kinds: tuple[BlockKind, ...] = ()
    usual: Block | None = None
    embedding: Block | None = None

    @classmethod
    def of(cls, model_type: str, measured: Mapping[int, Block]) -> Blocks:
        """Return a model's blocks: as they were measured, else as its family declares them."""
        family = family_of(model_type)
        embedding = None if family.embedding is None else family.embedding.block
        return cls(kinds_of(measured), family.block, embedding)

    @cached_property
    def measured(self) -> dict[int, Block]:
        """The blocks that were measured, by layer."""
        return by_layer(self.kinds)

    def block(self, layer: int | None, known: Collection[str] = ()) -> Block:
        """Return the structure of a block; of an unknown one, what its ``known`` sites tell."""
        measured = self.measured.get(layer) if layer is not None else None
        return measured or self.usual or ordered(tuple(known))

    def outside(self, place: Place) -> Block | None:
        """Return the structure of the stage outside the blocks that a place is of, if it has one.

        What stands outside the blocks has one module, but for some embeddings.
        """
        return self.embedding if place.layer is None and place.stage == EMBEDDING else None

    def order(self, site: Site) -> tuple[tuple[int, int, int], float, str, str]:
        """Return what sorts sites as a forward pass reaches them."""
        if site.layer is None:
            stage = self.outside(site.place)
            rank = float(site.end != "in") if stage is None else stage.rank(site.local)
            return site.pass_order(), rank, site.path, site.end
        block = self.block(site.layer, (site.local,))
        return site.pass_order(), block.rank(site.local), site.component, site.end

    def sorted(self, sites: Iterable[Site]) -> list[Site]:
        """Return sites in the order in which a forward pass reaches them."""
        return sorted(sites, key=self.order)


def kinds_of(measured: Mapping[int, Block]) -> tuple[BlockKind, ...]:
    """Return each different block once, with the layers that are built so."""
    layers: dict[Block, list[int]] = {}
    for layer, block in sorted(measured.items()):
        layers.setdefault(block, []).append(layer)
    return tuple(BlockKind(tuple(numbers), block) for block, numbers in layers.items())


def by_layer(kinds: Iterable[BlockKind]) -> dict[int, Block]:
    """Return the blocks of some kinds by layer."""
    return {layer: each.block for each in kinds for layer in each.layers}
