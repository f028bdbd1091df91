"""Run a scope of a model on a backend and keep its tensors, metrics and configuration."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity import console, registry
from layerparity.capture.recorder import Recorder
from layerparity.capture.wanted import Wanted
from layerparity.config import Config, FeedMode, RunKind
from layerparity.errors import Exit, UserError
from layerparity.inputs.base import Inputs, Request
from layerparity.jobs import _keep
from layerparity.manifest import Manifest
from layerparity.models.families.base import Family, family_of
from layerparity.models.resolve import open_checkpoint
from layerparity.plan import Scope, scope_of
from layerparity.ports.base import Assets, Port
from layerparity.sweep import PARENT_VARIABLE

if TYPE_CHECKING:
    from layerparity.backends.base import Backend
    from layerparity.models.checkpoint import Checkpoint


_BETWEEN_STAGES = (
    "embedding_multiplier",
    "logits_scaling",
    "logit_scale",
    "scale_emb",
    "final_logit_softcapping",
    "lm_head_multiplier",
)


@dataclass
class Settings:
    """conf/job/run.yaml."""

    name: str = "run"


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


def run(config: Config) -> Exit:
    """Make one run. Nothing is logged before the command is known to make sense."""
    from layerparity.tracking.store import open_store

    # The backend comes first: it decides what may be imported, and by whom.
    backend = registry.load("backends", config.backend.name).build(config.backend, config)
    store = open_store(config.tracking)
    backend.open()
    try:
        prepared = prepare(config, backend, store)
        fingerprint = _keep.fingerprint(prepared)
        again = store.by_fingerprint(fingerprint) if config.reuse else None
        if again is not None:
            parent = os.environ.get(PARENT_VARIABLE)
            if parent:
                store.adopt(parent, again)
            console.say(f"Reusing run {again.name} ({again.id}): same fingerprint.\n{again.url}")
            return Exit.OK
        return _log(prepared, store, fingerprint)
    finally:
        backend.close()


def prepare(config: Config, backend: Backend, store: Any) -> Prepared:
    """Decide scope, kind, inputs and capture, and say what was chosen."""
    checkpoint = open_checkpoint(config.model)
    family = family_of(str(checkpoint.config.get("model_type")))
    num_layers = _num_layers(checkpoint.config)
    scope = scope_of(config, num_layers, family)
    if config.kind is RunKind.auto:
        config.kind = RunKind(backend.default_kind)
    if config.feed is FeedMode.isolated and config.generate.max_new_tokens:
        raise UserError("Generation feeds each block the one before it: use feed=chained.")
    if config.generate.max_new_tokens:
        config.feed = FeedMode.chained
    request = Request(
        config=config,
        model_folder=checkpoint.folder,
        model=checkpoint.config,
        stages=scope.stages,
        site_of=lambda stage: family.input_site(stage, num_layers),
        golden=lambda reference: _keep.golden_for(store, reference, checkpoint, request),
    )
    inputs: Inputs = registry.load("inputs", config.inputs.name).prepare(config.inputs, request)
    if inputs.source in ("prompt", "tokens") and scope.stages[0] == "layers.0":
        scope = scope.with_embedding()
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


def _num_layers(config: dict[str, Any]) -> int:
    """Return the number of blocks. Raises UserError for a layout that cannot be run by stages."""
    model_type = config.get("model_type")
    if "num_hidden_layers" not in config:
        raise UserError(f"{model_type} is not laid out as embedding, blocks, norm and head.")
    # Between the stages nothing is computed, so a model that scales there would come out wrong.
    scaled = [key for key in _BETWEEN_STAGES if config.get(key) not in (None, 1, 1.0)]
    if scaled:
        raise UserError(f"{model_type} scales between its stages ({scaled[0]}): not supported yet.")
    return int(config["num_hidden_layers"])


def _settle_feed(config: Config, inputs: Inputs) -> None:
    if config.feed is FeedMode.auto:
        isolated = inputs.source == "golden"
        config.feed = FeedMode.isolated if isolated else FeedMode.chained
    elif config.feed is FeedMode.isolated and inputs.source != "golden":
        raise UserError(
            "feed=isolated wants the block inputs of a golden run: use inputs=golden, "
            "or feed=chained."
        )


def _log(prepared: Prepared, store: Any, fingerprint: str) -> Exit:
    config = prepared.config
    port = _build_port(prepared)
    parent = os.environ.get(PARENT_VARIABLE)
    name = config.name or _keep.run_name(prepared)
    if config.name and parent:
        # The sweep itself bears the name; its runs add what tells them apart.
        name = f"{config.name} {prepared.scope.describe()}"
    tags = _keep.tags(prepared, fingerprint)
    params = _keep.params(config)
    with store.start(name, config.kind.value, tags, params, parent=parent) as active:
        began = time.perf_counter()
        manifest, outcome = _execute(prepared, port, active, fingerprint)
        if not manifest.records:
            raise UserError("The run stored no site: capture.include= matches none of the scope's.")
        for line in prepared.backend.memory_table():
            console.say(str(line))
        _keep.finish(prepared, active, manifest, outcome, time.perf_counter() - began)
    console.say(f"{active.name}  {active.id}\n{active.url}")
    return Exit.OK


def _build_port(prepared: Prepared) -> Port:
    """Return the port, its weights found and its stages placed: the last chance to refuse."""
    assets = Assets(
        prepared.checkpoint, prepared.family, prepared.backend, prepared.config, prepared.wanted
    )
    chosen = prepared.config.port
    port: Port = registry.load("ports", chosen.name).build(chosen, assets)
    placed = port.place(prepared.scope.stages)
    for warning in prepared.backend.warnings:
        console.say(f"note: {warning}")
    rows = [(p.device, len(p.stages), console.bytes_text(p.bytes)) for p in placed]
    console.table("Placement", ("device", "modules", "weights"), rows)
    return port


def _execute(prepared: Prepared, port: Port, active: Any, fingerprint: str) -> tuple[Manifest, Any]:
    from layerparity.execute import Execution

    config, stages = prepared.config, prepared.scope.stages
    recorder = Recorder(active.folder)
    more = max(config.generate.max_new_tokens - 1, 0)
    title = "blocks and tokens" if more else "blocks"
    with console.progress(title, len(stages) + more) as bar:
        outcome = Execution(
            port=port,
            stages=stages,
            inputs=prepared.inputs,
            site_of=prepared.request.site_of,
            wanted=prepared.wanted,
            recorder=recorder,
            progress=bar.step,
            max_new_tokens=config.generate.max_new_tokens,
        ).run()
    return _keep.manifest(prepared, outcome, recorder.records, fingerprint), outcome
