"""Work out what one core holds where NxDI lays a model over cores, and what that costs it.

The names are those of transformers' modules, by which NxDI's converters read a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property

from layerparity.anatomy.shards import Heads, Widths, padded
from layerparity.anatomy.sizes import ModelSizes
from layerparity.plan.weights import StageWeight, WeightBytes

_FUSED = ("qkv_proj", "Wqkv", "query_key_value")
_ROUTERS = ("gate", "router")


class Surplus(StrEnum):
    """Why a core holds more than its even part."""

    query = "query heads of zeros"
    kv = "KV heads repeated"
    width = "embedding padded"
    vocabulary = "vocabulary padded"
    whole = "held whole by every core"


@dataclass(frozen=True)
class CoreLayout:
    """A model of some sizes over ``degree`` cores, ``ep`` groups of them by expert.

    Experts cost a core the same whichever way they are split.
    """

    sizes: ModelSizes
    degree: int
    ep: int = 1

    @cached_property
    def heads(self) -> Heads:
        """The heads of each core."""
        return Heads(self.sizes.heads, self.sizes.kv_heads, self.degree)

    @cached_property
    def width(self) -> int:
        """Channels of the embedding, which every core holds a part of for every token."""
        return padded(self.sizes.hidden, self.degree)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the head."""
        return padded(self.sizes.vocabulary, self.degree)

    def bytes_of(self, weights: Iterable[StageWeight], dtype: str) -> WeightBytes:
        """Return what one core holds of some tensors in a run of ``dtype``, each rounded up."""
        total = WeightBytes()
        for weight in weights:
            more = 1 + sum(self._added[self._kind(weight)].values())
            # In whole numbers: thousands of tensors are asked about for every degree.
            held = -(-weight.bytes(dtype) * more.numerator // (more.denominator * self.degree))
            total += WeightBytes(held, 0) if weight.parameter else WeightBytes(0, held)
        return total

    def added(self, weights: Iterable[StageWeight], dtype: str) -> dict[Surplus, int]:
        """Return by its cause how many bytes of some tensors a core holds beyond an even part."""
        found = dict.fromkeys(Surplus, Fraction())
        for weight in weights:
            for cause, part in self._added[self._kind(weight)].items():
                found[cause] += weight.bytes(dtype) * part / self.degree
        return {cause: round(size) for cause, size in found.items() if size}

    def cache_part(self) -> Fraction:
        """Return which part of one sequence's keys and values a core holds."""
        return Fraction(self.heads.held_kv, self.sizes.kv_heads * self.degree)

    def _kind(self, weight: StageWeight) -> str:
        """Return which rule of `_added` serves a tensor; empty where it is split evenly."""
        *_, module, kind = weight.name.split(".")
        if module in ("embed_tokens", "lm_head"):
            return module
        if module in ("q_proj", "k_proj", "v_proj", *_FUSED):
            return "fused" if module in _FUSED else module[0]
        if module == "o_proj" and kind != "bias":
            return "q"
        return "whole" if len(weight.shape) < 2 or _is_router(weight) else ""

    @cached_property
    def _added(self) -> Mapping[str, Mapping[Surplus, Fraction]]:
        """What all cores hold of a tensor beyond its bytes, as a part of them, by cause."""
        sizes, heads = self.sizes, self.heads
        query, kv = heads.padded_query - sizes.heads, heads.held_kv - sizes.kv_heads
        rows = sizes.heads + 2 * sizes.kv_heads
        grown = {
            "q": {Surplus.query: Fraction(query, sizes.heads)},
            "k": {Surplus.kv: Fraction(kv, sizes.kv_heads)},
            "fused": {Surplus.query: Fraction(query, rows), Surplus.kv: Fraction(2 * kv, rows)},
            "embed_tokens": {Surplus.width: Fraction(self.width - sizes.hidden, sizes.hidden)},
            "lm_head": {
                Surplus.vocabulary: Fraction(self.vocabulary - sizes.vocabulary, sizes.vocabulary)
            },
            "whole": {Surplus.whole: Fraction(self.degree - 1)},
            "": {},
        }
        return {**grown, "v": grown["k"]}


def widths_of(sizes: ModelSizes, weights: Iterable[StageWeight]) -> Widths:
    """Return what must divide evenly of a scope's tensors; what none of them has is 0."""
    inside = [weight for weight in weights if len(weight.shape) > 1 and not _is_router(weight)]
    expert = any(".experts" in weight.name for weight in inside)
    mlps = [w for w in inside if ".mlp." in w.name and ".experts" not in w.name]
    dense = any(sizes.intermediate in weight.shape for weight in mlps)
    return Widths(
        sizes.intermediate if dense else 0,
        sizes.expert_intermediate if expert else 0,
        sizes.experts if expert else 0,
    )


def _is_router(weight: StageWeight) -> bool:
    return weight.name.split(".")[-2] in _ROUTERS
