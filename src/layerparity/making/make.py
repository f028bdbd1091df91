"""Make one run: from a composed configuration to a finished run in the store."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from layerparity.ground import console, progress
from layerparity.ground.errors import UserError
from layerparity.making import part_before, reuse, terminal, write
from layerparity.making.fingerprint import fingerprint_of
from layerparity.making.prepare import Prepared, plan_run, prepare, with_kind
from layerparity.making.request import goldens
from layerparity.making.sweep import PARENT_VARIABLE, open_store
from layerparity.ports.base import Assets, Port
from layerparity.ports.opening import open_backend, open_port
from layerparity.record.manifest import Manifest
from layerparity.record.recorder import Recorder
from layerparity.settings.config import Config, RunKind
from layerparity.tracking.links import say_link, say_served

if TYPE_CHECKING:
    from layerparity.making.pass_result import PassResult
    from layerparity.making.reference import ReferenceRecorder
    from layerparity.record.progress import StoredProgress
    from layerparity.tracking.store import Store


class FinishedRun(NamedTuple):
    """A run: its id, its name, what it holds, the runs that fed it; was it there before?

    ``off`` is why it is a golden that cannot be believed, or empty.
    """

    id: str
    name: str
    manifest: Manifest
    fed_by: tuple[str, ...]
    is_reused: bool
    off: str = ""


def make_run(config: Config) -> FinishedRun:
    """Make one run, or find the one that is reused."""
    began, parent = terminal.began(), os.environ.get(PARENT_VARIABLE)
    with decided(config, open_store) as (store, prepared, mark), reuse.alone(config, store, mark):
        own = not open_port.is_ours(config.port)
        reused = reuse.reusable(store, mark, own) if config.reuse else None
        if reused is None:
            return _run(prepared, store, parent, mark, began)
    if parent:
        store.adopt(parent, reused)
    console.say(f"Reusing run {reused.name} ({reused.id}): same fingerprint.\n{reused.url}")
    if own:
        console.say(reuse.covered(reused))
    say_served(config.tracking)
    fed_by = tuple(reused.tags.get("inputs_from", "").split())
    return FinishedRun(reused.id, reused.name, reused.read_manifest(), fed_by, is_reused=True)


@contextmanager
def decided(
    config: Config, open_store: Callable[[object], Store]
) -> Iterator[tuple[Store, Prepared, str]]:
    """Yield the store, the run that a command asks for on its opened backend, and its fingerprint.

    Raises UserError for whatever can be refused before a port is built.
    """
    # What can be refused without torch is refused before it: importing it takes seconds.
    plan = plan_run(with_kind(config))
    terminal.say_loading(config)
    # Refuses resume=true where nothing is left to go on from.
    reuse.can_go_on(config)
    store = open_store(config.tracking)
    goldens.refuse_unknown(plan.config, plan.scope.stages, store)
    # The backend decides what more may be imported, and by whom.
    with open_backend.opened(plan.config) as backend:
        prepared = prepare(plan, backend, store)
        yield store, prepared, fingerprint_of(prepared)


def _run(
    prepared: Prepared, store: Store, parent: str | None, fingerprint: str, began: float
) -> FinishedRun:
    """Execute a run that is decided, and keep it in the store under a parent."""
    from layerparity.model import idle_skeletons
    from layerparity.ports.known.hf import HfPort
    from layerparity.record.progress import remove_progress
    from layerparity.tracking.system import SystemMetrics

    config = prepared.config
    own = not open_port.is_ours(config.port)
    before = reuse.resumable(store, fingerprint, own) if config.resume else None
    port = build_port(prepared)
    name = config.name or write.run_name(prepared)
    if config.name and parent:
        # The sweep itself bears the name; its runs add what tells them apart.
        name = f"{config.name} {prepared.scope.describe()}"
    tags = write.tags(prepared, fingerprint)
    params = write.shown_params(config)
    with store.start(name, config.kind.value, tags, params, parent=parent) as active:
        active.log_input(*write.dataset(prepared))
        executed = time.perf_counter()
        progress = reuse.go_on(active, *before) if before else None
        with SystemMetrics() as system:
            notes = reuse.can_go_on(config)
            active.keep_log()
            manifest, result = execute(
                prepared, port, active.folder, fingerprint, before=progress, notes=notes
            )
        if not manifest.records:
            raise UserError("The run stored no site: capture.include= matches none of the scope's.")
        for line in prepared.backend.memory_table():
            console.say(str(line))
        now = time.perf_counter()
        took = {"seconds": now - executed, "whole": now - began}
        off = write.finish(prepared, active, manifest, result, **took, system=system.points)
    # Not before the store knows that the run is finished: until then it can be resumed.
    remove_progress(active.folder)
    if type(port) is HfPort:
        # Ports that are made of this one may have changed its modules.
        idle_skeletons.give_back(port.skeleton)
    say_link(active, config.tracking)
    fed_by = tuple(prepared.inputs.runs)
    if off:
        console.note(
            f"Golden run {name} cannot be believed: {off}. Nothing is judged by it there, and "
            "'latest' passes it over. Make it again; where it is off again, on another device, or "
            "with another attn_implementation= or experts_implementation=."
        )
    return FinishedRun(active.id, active.name, manifest, fed_by, is_reused=False, off=off)


def build_port(prepared: Prepared, make: Callable[[Assets], Port] | None = None) -> Port:
    """Return the port, its weights found and its stages placed: the last chance to refuse.

    ``make`` makes another one than the configuration names.
    """
    assets = Assets(
        prepared.original or prepared.checkpoint,
        prepared.family,
        prepared.backend,
        prepared.config,
        prepared.wanted,
        prepared.inputs.recorded,
    )
    if prepared.original is not None and make is None:
        from layerparity.making.original import OriginalPort

        make = partial(OriginalPort, checkpoint=prepared.checkpoint)
    chosen = open_port.chosen_for(prepared.config)
    port = make(assets) if make is not None else open_port.build(chosen, assets)
    placed = port.place(prepared.scope.stages)
    for warning in prepared.backend.warnings:
        console.note(f"{warning}")
    rows = [(p.device, len(p.stages), console.bytes_text(p.bytes)) for p in placed]
    console.table("Placement", ("device", "modules", "weights"), rows)
    return port


def _references(prepared: Prepared, port: Port, folder: Path) -> ReferenceRecorder | None:
    """Return what is computed beside a golden run; a candidate, or another machine's, has none."""
    from layerparity.ports.known.hf import HfPort

    config = prepared.config
    wanted = config.reference.make and config.kind is RunKind.golden
    able = open_backend.abilities(config).references
    if not wanted or not able or not isinstance(port, HfPort):
        return None
    from layerparity.making.original import OriginalPort
    from layerparity.making.reference import ReferenceRecorder, floor_dtypes
    from layerparity.model.activations import of_any
    from layerparity.numbers.operands import ACTIVATIONS

    # A golden of a candidate's own values judges that one: computed, fed and split as this one is.
    others = not prepared.inputs.values_of
    asked = [dtype.value for dtype in config.reference.dtypes or ([] if others else [config.dtype])]
    dtypes = floor_dtypes(port, asked, [*map(str, config.operands)])
    published = port.published if isinstance(port, OriginalPort) else None
    if ACTIVATIONS in map(str, config.operands):
        of_weights = published.checkpoint if published else port.assets.checkpoint
        if of_any(of_weights) is None:
            console.note(
                "operands=[activations] changes nothing: config.json does not say how what is "
                "multiplied is rounded, or says it in a way that is not read"
            )
    chained, components = config.reference.chained, config.reference.components
    return ReferenceRecorder(
        port,
        folder,
        dtypes,
        others and chained,
        others and components,
        published,
        part_before.states_of(prepared.inputs.before) if chained else {},
        prepared.scope.chunk is not None,
    )


def _step_weights(prepared: Prepared, port: Port, tokens: int) -> list[float]:
    """Return what each stage, and then each further token, weighs in how long the rest takes."""
    from layerparity.ports.known.hf import HfPort

    stages = prepared.scope.stages
    weights = [1.0] * len(stages)
    if isinstance(port, HfPort):
        checkpoint = port.assets.checkpoint
        stored = [port.skeleton.stored_bytes(checkpoint, stage) for stage in stages]
        # Reading takes as long as the bytes are many; what few of many experts compute, and what
        # is evaluated beside it, does not: the root lies between the two.
        weights = [math.sqrt(1 + each) for each in stored]
    # Where weights stream, a token reads all of them again.
    token = sum(weights) / (1 if prepared.backend.streams else len(weights))
    return [*weights, *[token] * tokens]


def execute(
    prepared: Prepared,
    port: Port,
    folder: Path,
    fingerprint: str,
    *,
    before: StoredProgress | None = None,
    notes: bool = False,
) -> tuple[Manifest, PassResult]:
    """Run the scope, its tensors kept in ``folder``; return what describes them.

    With ``notes`` another process can go on where this one stops, as this one does from what was
    noted ``before``.
    """
    from layerparity.making.execute import Execution
    from layerparity.making.journal import Journal
    from layerparity.model.prints import against

    config, stages = prepared.config, prepared.scope.stages
    recorder, references = Recorder(folder), _references(prepared, port, folder)
    journal = None
    if notes:
        warnings = prepared.backend.warnings
        journal = Journal(folder, fingerprint, port, recorder, references, warnings, before)
    more = max(config.generate.max_new_tokens - 1, 0)
    title = "blocks and tokens" if more else "blocks"
    with progress.shown(title, len(stages) + more, _step_weights(prepared, port, more)) as bar:
        result = Execution(
            port=port,
            stages=stages,
            inputs=prepared.inputs,
            input_sites={
                stage: prepared.inputs.sites.get(stage, prepared.sites_of(stage)[0])
                for stage in stages
            },
            wanted=prepared.wanted,
            recorder=recorder,
            count=bar,
            max_new_tokens=config.generate.max_new_tokens,
            takes=prepared.scope.takes,
            references=references,
            streams=prepared.backend.streams,
            ahead=prepared.backend.ahead,
            journal=journal,
        ).run()
    result.effective = {
        stage: against(prepared.checkpoint, prints) for stage, prints in result.effective.items()
    }
    return write.manifest_of(prepared, result, recorder.records, fingerprint), result
