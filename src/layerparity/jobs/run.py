"""Run a scope of a model on a backend and keep its tensors, metrics and configuration."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity import console, ports, registry
from layerparity.capture.recorder import Recorder
from layerparity.capture.wanted import Wanted
from layerparity.config import Config, FeedMode, RunKind
from layerparity.errors import Exit, UserError
from layerparity.inputs import _replay
from layerparity.inputs.base import Inputs, Request
from layerparity.jobs import _early, _given, _goldens, _keep, _reuse, _start
from layerparity.jobs._effective import held_against
from layerparity.jobs._links import say_link, say_served
from layerparity.manifest import Manifest
from layerparity.models.families.base import Family, family_of
from layerparity.models.resolve import open_checkpoint
from layerparity.plan import Scope, num_layers_of, scope_of
from layerparity.ports.base import Assets, Port
from layerparity.sweep import PARENT_VARIABLE

if TYPE_CHECKING:
    from layerparity.backends.base import Backend
    from layerparity.models.checkpoint import Checkpoint
    from layerparity.outcome import Outcome
    from layerparity.reference import References


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
    make(config)
    return Exit.OK


def make(config: Config) -> str:
    """Make one run, or find the one that is reused, and return its id."""
    from layerparity.tracking.store import open_store

    began = _start.began()
    # What can be refused without torch is refused before it: importing it takes seconds.
    _early.settle_kind(config)
    _early.refuse(config)
    _start.say_loading(config)
    store = open_store(config.tracking)
    _early.refuse_unknown_golden(config, store)
    # The backend decides what more may be imported, and by whom.
    backend = registry.load("backends", config.backend.name).build(config.backend, config)
    backend.open()
    try:
        prepared = prepare(config, backend, store)
        fingerprint = _keep.fingerprint(prepared)
        again = _reuse.reusable(store, fingerprint) if config.reuse else None
        if again is not None:
            parent = os.environ.get(PARENT_VARIABLE)
            if parent:
                store.adopt(parent, again)
            console.say(f"Reusing run {again.name} ({again.id}): same fingerprint.\n{again.url}")
            say_served(config.tracking)
            return again.id
        return _log(prepared, store, fingerprint, began)
    finally:
        backend.close()


def prepare(config: Config, backend: Backend, store: Any) -> Prepared:
    """Decide scope, kind, inputs and capture, and say what was chosen."""
    checkpoint = open_checkpoint(config.model)
    family = family_of(str(checkpoint.config.get("model_type")))
    num_layers = num_layers_of(checkpoint.config)
    scope = scope_of(config, num_layers, family)
    if config.kind is RunKind.auto:
        config.kind = RunKind(backend.default_kind)
    request = Request(
        config=config,
        model_folder=checkpoint.folder,
        model=checkpoint.config,
        stages=scope.stages,
        site_of=lambda stage: family.input_site(stage, num_layers),
        golden=lambda reference: _goldens.golden_for(store, reference, checkpoint, request),
    )
    inputs: Inputs = registry.load("inputs", config.inputs.name).prepare(config.inputs, request)
    if inputs.source in ("prompt", "tokens") and scope.stages[0] == "layers.0":
        scope = scope.with_embedding()
    _given.refuse_unused(backend, inputs)
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


def _log(prepared: Prepared, store: Any, fingerprint: str, began: float) -> str:
    from layerparity.tracking.system import SystemMetrics

    config = prepared.config
    port = build_port(prepared)
    parent = os.environ.get(PARENT_VARIABLE)
    name = config.name or _keep.run_name(prepared)
    if config.name and parent:
        # The sweep itself bears the name; its runs add what tells them apart.
        name = f"{config.name} {prepared.scope.describe()}"
    tags = _keep.tags(prepared, fingerprint)
    params = _keep.params(config)
    with store.start(name, config.kind.value, tags, params, parent=parent) as active:
        executed = time.perf_counter()
        with SystemMetrics() as system:
            manifest, outcome = execute(prepared, port, active.folder, fingerprint)
        active.log_metrics(system.points)
        if not manifest.records:
            raise UserError("The run stored no site: capture.include= matches none of the scope's.")
        for line in prepared.backend.memory_table():
            console.say(str(line))
        now = time.perf_counter()
        took = {"seconds": now - executed, "whole": now - began}
        _keep.finish(prepared, active, manifest, outcome, **took)
    say_link(active, config.tracking)
    return str(active.id)


def build_port(prepared: Prepared) -> Port:
    """Return the port, its weights found and its stages placed: the last chance to refuse."""
    assets = Assets(
        prepared.checkpoint, prepared.family, prepared.backend, prepared.config, prepared.wanted
    )
    port = ports.build(prepared.config.port, assets)
    placed = port.place(prepared.scope.stages)
    for warning in prepared.backend.warnings:
        console.say(f"note: {warning}")
    rows = [(p.device, len(p.stages), console.bytes_text(p.bytes)) for p in placed]
    console.table("Placement", ("device", "modules", "weights"), rows)
    return port


def _references(prepared: Prepared, port: Port, folder: Path) -> References | None:
    """Return what is computed beside a golden run; a candidate, or another machine's, has none."""
    from layerparity.ports.hf import HfPort

    config = prepared.config
    wanted = config.reference.make and config.kind is RunKind.golden
    if not wanted or not isinstance(port, HfPort) or config.backend.name != "gpu":
        return None
    from layerparity.reference import References, floor_dtypes

    asked = [dtype.value for dtype in config.reference.dtypes]
    dtypes = floor_dtypes(port, asked)
    return References(port, folder, dtypes, config.reference.chained, config.reference.components)


def execute(
    prepared: Prepared, port: Port, folder: Path, fingerprint: str
) -> tuple[Manifest, Outcome]:
    """Run the scope, its tensors kept in ``folder``; return what describes them."""
    from layerparity.execute import Execution

    config, stages = prepared.config, prepared.scope.stages
    recorder = Recorder(folder)
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
            references=_references(prepared, port, folder),
            streams=prepared.backend.streams,
            ahead=prepared.backend.ahead,
        ).run()
    outcome.effective = held_against(prepared.checkpoint, outcome.effective)
    return _keep.manifest(prepared, outcome, recorder.records, fingerprint), outcome
