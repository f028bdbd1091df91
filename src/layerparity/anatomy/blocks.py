"""Blocks: the structure of every block of a model, and the order of all its sites."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from layerparity.anatomy.block import Block, ordered
from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import Site


@dataclass(frozen=True)
class BlockKind:
    """The structure that some layers of a model share."""

    layers: tuple[int, ...]
    block: Block


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model by layer; ``usual`` stands for those that nobody measured."""

    by_layer: Mapping[int, Block] = field(default_factory=dict)
    usual: Block | None = None

    @classmethod
    def of(cls, model_type: str, measured: Mapping[int, Block]) -> Blocks:
        """Return a model's blocks: as they were measured, else as its family declares them."""
        return cls(dict(measured), family_of(model_type).block)

    def block(self, layer: int | None, known: Collection[str] = ()) -> Block:
        """Return the structure of a block; of an unknown one, what its ``known`` sites tell."""
        measured = self.by_layer.get(layer) if layer is not None else None
        return measured or self.usual or ordered(known)

    def order(self, site: Site) -> tuple[tuple[int, int, int], float, str, str]:
        """Return what sorts sites as a forward pass reaches them."""
        if site.layer is None:
            return site.pass_order(), 0 if site.end == "in" else 1, site.path, site.end
        block = self.block(site.layer, (site.local,))
        return site.pass_order(), block.rank(site.local), site.component, site.end

    def sorted(self, sites: Iterable[Site]) -> list[Site]:
        """Return sites in the order in which a forward pass reaches them."""
        return sorted(sites, key=self.order)

    def kinds(self) -> tuple[BlockKind, ...]:
        """Return each different block that was measured once, with the layers that are built so."""
        layers: dict[Block, list[int]] = {}
        for layer, block in sorted(self.by_layer.items()):
            layers.setdefault(block, []).append(layer)
        return tuple(BlockKind(tuple(numbers), block) for block, numbers in layers.items())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        usual = self.usual.to_dict() if self.usual else None
        return {"kinds": [asdict(each) for each in self.kinds()], "usual": usual}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Blocks:
        """Read what `to_dict` gave. Raises KeyError or TypeError where it is damaged."""
        usual = Block.from_dict(raw["usual"]) if raw["usual"] else None
        kinds = (BlockKind(tuple(k["layers"]), Block.from_dict(k["block"])) for k in raw["kinds"])
        return cls(by_layer(kinds), usual)


def by_layer(kinds: Iterable[BlockKind]) -> dict[int, Block]:
    """Return the blocks of some kinds by layer."""
    return {layer: each.block for each in kinds for layer in each.layers}
