"""Turn the scope that a command asks for into stages, before any weight is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from layerparity.anatomy.family import OUTSIDE, Family, Values
from layerparity.anatomy.site import EMBEDDING, Place, Site
from layerparity.ground.errors import UserError
from layerparity.record.manifest import scope_text
from layerparity.settings.config import Config, RunKind, ScopeKind
from layerparity.settings.model import ModelSettings


@dataclass(frozen=True)
class Scope:
    """The asked part of a model: its stages in order, and how it is described.

    Its blocks may take more of other stages than their state (``takes``). ``chunk`` is which of the
    parts it is, where a model is cut into some.
    """

    kind: str
    stages: tuple[str, ...]
    start: int | None = None
    end: int | None = None
    component: str | None = None
    takes: bool = False
    chunk: int | None = None

    def describe(self) -> str:
        """Return the scope as a user would say it."""
        return scope_text(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return what the manifest keeps."""
        kept = {"start": self.start, "end": self.end, "component": self.component}
        return {"kind": self.kind, **kept}

    @property
    def needed(self) -> tuple[str, ...]:
        """The stages whose weights are read; the embedding too, where tokens may be fed."""
        return (EMBEDDING, *self.stages) if begins_with_tokens(self.stages) else self.stages

    def with_embedding(self) -> Scope:
        """Return the scope with the embedding before its first block."""
        return replace(self, stages=(EMBEDDING, *self.stages))

    def with_handers(self, family: Family, values: Values) -> Scope:
        """Return the scope with the stages that hand on what its blocks take beside their state.

        ``values`` are config.json's. Raises UserError for some that cannot be read.
        """
        if family.handers is None:
            return self
        found, due, takes = set(self.stages), list(self.stages), False
        while due:
            place = Place.parse(due.pop())
            if place.layer is None or place.module not in ("", "self_attn"):
                continue
            try:
                handers = set(family.handers(values, place.layer))
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(
                    f"config.json does not say which blocks of {family.model_type} hand on to "
                    f"others ({error}): check its lists, and its numbers of layers."
                ) from error
            # What a block is given of the embedding, its attention does not see.
            more = handers - ({EMBEDDING} if place.module else set())
            takes = takes or bool(more)
            due += more - found
            found |= more
        stages = sorted(found, key=lambda stage: Site(stage, "in").pass_order())
        return replace(self, stages=tuple(stages), takes=takes)

    def refuse_gaps(self) -> None:
        """Refuse to feed stages by the ones before them where some are left out. UserError."""
        places = [Place.parse(stage) for stage in self.stages]
        for before, after in pairwise(places):
            first = 0 if before.layer is None else before.layer + 1
            if after.layer is not None and (after.layer != first or after.module):
                raise UserError(
                    f"{after} takes what {self.stages[0]} hands on beside its state, and what is "
                    "between them is not in the scope",
                    f"use inputs=golden, which feeds each its own, or scope=range "
                    f"start={places[0].layer or 0} end={places[-1].layer}.",
                )


def begins_with_tokens(stages: Sequence[str]) -> bool:
    """Say whether token ids can be where a scope begins: at the embedding, or at block 0."""
    return stages[0] in (EMBEDDING, str(Place(0)))


# Far beyond any model's: a list of a thousand million blocks takes all memory before it is wrong.
_MOST_BLOCKS = 100_000


def num_layers_of(model: Values) -> int:
    """Return config.json's number of blocks. Raises UserError for what cannot be run by stages."""
    if "num_hidden_layers" not in model:
        kind = model.get("model_type")
        raise UserError(
            f"{kind} counts no blocks (num_hidden_layers): it is not laid out as embedding, "
            "blocks, norm and head."
        )
    count = model["num_hidden_layers"]
    if type(count) is not int or not 1 <= count <= _MOST_BLOCKS:
        raise UserError(
            f"config.json has num_hidden_layers={count}, which is no number of blocks: check it."
        )
    return count


def scope_of(config: Config, num_layers: int, family: Family) -> Scope:
    """Return the scope a command asks for. Raises UserError for keys that do not belong to it."""
    kind = config.scope.kind
    _refuse_strangers(config, kind)
    if kind is ScopeKind.full:
        blocks = tuple(str(Place(layer)) for layer in range(num_layers))
        return Scope("full", ("embed_tokens", *blocks, "norm", "lm_head"), 0, num_layers - 1)
    if kind is ScopeKind.range:
        first, last = _range(config, num_layers)
        stages = [str(Place(layer)) for layer in range(first, last + 1)]
        chunks, chunk = config.layer_chunks, config.chunk if config.layer_chunks else None
        whole = config.start is None and config.end is None
        if config.kind is RunKind.golden and whole and chunk is not None and chunk + 1 == chunks:
            # All parts together are a golden of the whole model.
            stages += ["norm", "lm_head"]
        # A range of its own begins with what a golden recorded, and so do its parts.
        return Scope("range", tuple(stages), first, last, chunk=None if config.start else chunk)
    component = config.component
    if component in OUTSIDE and config.layer is None:
        return Scope("single", (OUTSIDE[component],), component=component)
    if config.layer is None:
        raise UserError(f"scope=single wants layer=N, 0 to {num_layers - 1}.")
    if component in OUTSIDE:
        raise UserError(f"component={component} belongs to no layer: leave layer= out.")
    _in_range("layer", config.layer, num_layers, config.model)
    stage = family.stage(component, config.layer) if component else str(Place(config.layer))
    return Scope("single", (stage,), config.layer, config.layer, component)


def _range(config: Config, num_layers: int) -> tuple[int, int]:
    """Return the first and the last block of scope=range, or of its chunk."""
    first, last = config.start, config.end
    if config.layer_chunks is not None:
        # Chunks are of the whole model where no range is given.
        first, last = first or 0, num_layers - 1 if last is None else last
    if first is None or last is None:
        raise UserError(
            f"scope=range wants start=A end=B (inclusive), 0 to {num_layers - 1}",
            "or -m layer_chunks=N for all blocks in N ranges.",
        )
    _in_range("start", first, num_layers, config.model)
    _in_range("end", last, num_layers, config.model)
    if last < first:
        raise UserError(f"end={last} comes before start={first}: swap them.")
    if config.layer_chunks is None:
        return first, last
    return _chunk(first, last, config.layer_chunks, config.chunk)


def _chunk(first: int, last: int, chunks: int, chunk: int | None) -> tuple[int, int]:
    """Return the ends of one of several ranges of blocks, whose lengths differ by one at most."""
    count = last - first + 1
    if chunks > count:
        raise UserError(
            f"layer_chunks={chunks} is more than the {count} blocks that are cut",
            f"use {count} or less.",
        )
    if chunk is None:
        raise UserError(
            f"layer_chunks={chunks} cuts a sweep into parts",
            f"add -m, or chunk=N (0 to {chunks - 1}) for one of them.",
        )
    if chunk >= chunks:
        raise UserError(
            f"chunk={chunk} is out of range: layer_chunks={chunks} has 0 to {chunks - 1}."
        )
    return first + count * chunk // chunks, first + count * (chunk + 1) // chunks - 1


def _in_range(name: str, value: int, num_layers: int, model: ModelSettings) -> None:
    if not 0 <= value < num_layers:
        has = f"{name}={value} is out of range: {model.label} has layers 0 to {num_layers - 1}"
        if model.shipped is None:
            raise UserError(f"{has}.")
        # The small model that is run where none is named.
        raise UserError(has, "name your own: model=FOLDER")


def _refuse_strangers(config: Config, kind: ScopeKind) -> None:
    belongs = {
        "layer": ScopeKind.single,
        "component": ScopeKind.single,
        "start": ScopeKind.range,
        "end": ScopeKind.range,
        "layer_chunks": ScopeKind.range,
        "chunk": ScopeKind.range,
    }
    for key, owner in belongs.items():
        value = getattr(config, key)
        if value is not None and owner is not kind:
            raise UserError(
                f"{key}={value} does not belong to scope={kind.value}: use scope={owner.value}."
            )
    if config.chunk is not None and config.layer_chunks is None:
        raise UserError(f"chunk={config.chunk} is one of layer_chunks=N: give that too.")
    if config.generate.max_new_tokens and kind is not ScopeKind.full:
        raise UserError("generate.max_new_tokens needs the whole model: use scope=full.")
