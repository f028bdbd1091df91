"""Prepare: everything that is decided about a run before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import Family, family_of
from layerparity.ground import console, registry
from layerparity.ground.errors import UserError
from layerparity.model.resolve import open_checkpoint
from layerparity.record.wanted import Wanted
from layerparity.run import goldens, typed_keys
from layerparity.run.inputs import _replay
from layerparity.run.inputs.base import Inputs, Request
from layerparity.run.scope import Scope, num_layers_of, scope_of
from layerparity.settings.config import Config, FeedMode

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.run.backends.base import Backend


@dataclass
class Prepared:
    """Everything that is decided before a weight is read."""

    config: Config
    checkpoint: Checkpoint
    family: Family
    backend: Backend
    scope: Scope
    request: Request
    inputs: Inputs
    wanted: Wanted


def prepare(config: Config, backend: Backend, store: Any) -> Prepared:
    """Decide scope, kind, inputs and capture, and say what was chosen."""
    checkpoint = open_checkpoint(config.model)
    family = family_of(str(checkpoint.config.get("model_type")))
    num_layers = num_layers_of(checkpoint.config)
    scope = scope_of(config, num_layers, family)
    request = Request(
        config=config,
        model_folder=checkpoint.folder,
        model=checkpoint.config,
        stages=scope.stages,
        site_of=lambda stage: family.input_site(stage, num_layers),
        golden=lambda reference: goldens.golden_for(store, reference, checkpoint, request),
    )
    inputs: Inputs = registry.load("run.inputs", config.inputs.name).prepare(config.inputs, request)
    if inputs.source in ("prompt", "tokens") and scope.stages[0] == "layers.0":
        scope = scope.with_embedding()
    typed_keys.refuse_unused(backend, inputs)
    _replay.refuse_unfed(config, inputs)
    _settle_feed(config, inputs)
    wanted = Wanted(
        config.capture.name, tuple(config.capture.include), tuple(config.capture.exclude)
    )
    console.say(
        f"{config.kind.value} run of {config.model.name}, {scope.describe()}, on "
        f"{backend.name} ({backend.device_label}), {config.dtype.value}, capture={wanted.name}\n"
        f"fed {inputs.chosen}; feed={config.feed.value}"
    )
    return Prepared(config, checkpoint, family, backend, scope, request, inputs, wanted)


def _settle_feed(config: Config, inputs: Inputs) -> None:
    if config.feed is FeedMode.auto:
        isolated = inputs.source == "golden"
        config.feed = FeedMode.isolated if isolated else FeedMode.chained
    elif config.feed is FeedMode.isolated and inputs.source != "golden":
        raise UserError(
            "feed=isolated wants the block inputs of a golden run: use inputs=golden, "
            "or feed=chained."
        )
