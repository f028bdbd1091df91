"""Turn the scope that a command asks for into stages, before any weight is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerparity.anatomy.family import OUTSIDE, Family
from layerparity.anatomy.site import EMBEDDING, Place
from layerparity.ground.errors import UserError
from layerparity.record.manifest import scope_text
from layerparity.settings.config import Config, ModelSettings, ScopeKind


@dataclass(frozen=True)
class Scope:
    """The asked part of a model: its stages in order, and how it is described."""

    kind: str
    stages: tuple[str, ...]
    start: int | None = None
    end: int | None = None
    component: str | None = None

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
        stages = ("embed_tokens", *self.stages)
        return Scope(self.kind, stages, self.start, self.end, self.component)


def begins_with_tokens(stages: Sequence[str]) -> bool:
    """Say whether token ids can be where a scope begins: at the embedding, or at block 0."""
    return stages[0] in (EMBEDDING, str(Place(0)))


# Far beyond any model's: a list of a thousand million blocks takes all memory before it is wrong.
_MOST_BLOCKS = 100_000


def num_layers_of(model: Mapping[str, Any]) -> int:
    """Return config.json's number of blocks. Raises UserError for what cannot be run by stages."""
    if "num_hidden_layers" not in model:
        kind = model.get("model_type")
        raise UserError(f"{kind} is not laid out as embedding, blocks, norm and head.")
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
        if config.start is None or config.end is None:
            raise UserError(f"scope=range wants start=A end=B (inclusive), 0 to {num_layers - 1}.")
        _in_range("start", config.start, num_layers, config.model)
        _in_range("end", config.end, num_layers, config.model)
        if config.end < config.start:
            raise UserError(f"end={config.end} comes before start={config.start}: swap them.")
        blocks = tuple(str(Place(layer)) for layer in range(config.start, config.end + 1))
        return Scope("range", blocks, config.start, config.end)
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


def _in_range(name: str, value: int, num_layers: int, model: ModelSettings) -> None:
    if not 0 <= value < num_layers:
        has = f"{name}={value} is out of range: {model.label} has layers 0 to {num_layers - 1}"
        if model.shipped is None:
            raise UserError(f"{has}.")
        # The small model that is run where none is named.
        raise UserError(has, "name your own: model=checkpoint model.path=FOLDER")


def _refuse_strangers(config: Config, kind: ScopeKind) -> None:
    belongs = {
        "layer": ScopeKind.single,
        "component": ScopeKind.single,
        "start": ScopeKind.range,
        "end": ScopeKind.range,
    }
    for key, owner in belongs.items():
        value = getattr(config, key)
        if value is not None and owner is not kind:
            raise UserError(
                f"{key}={value} does not belong to scope={kind.value}: use scope={owner.value}."
            )
    if config.generate.max_new_tokens and kind is not ScopeKind.full:
        raise UserError("generate.max_new_tokens needs the whole model: use scope=full.")
