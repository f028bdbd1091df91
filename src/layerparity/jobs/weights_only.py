"""job=compare what=weights: a port's own loading against the checkpoint, without a forward pass."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.judge.weights_diff import diff_side
from layerparity.record.findings import WeightFinding
from layerparity.record.manifest import WeightPrint
from layerparity.record.wanted import Wanted
from layerparity.run import open_backend, open_port, terminal
from layerparity.run.ports.base import Assets, Port
from layerparity.run.prepare import RunPlan, plan_run
from layerparity.settings.config import Config
from layerparity.tracking.links import say_served

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.run.backends.base import Backend
    from layerparity.run.scope import Scope
    from layerparity.tracking.store import Store

_SHOWN = 24


@dataclass
class Checked:
    """What a port made of a checkpoint: prints and names used by stage, and what is wrong.

    ``silent`` are the stages whose weights the port says nothing of.
    """

    prints: dict[str, dict[str, WeightPrint]] = field(default_factory=dict)
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[WeightFinding] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """How many stored tensors have a print."""
        return sum(len(held) for held in self.prints.values())

    @property
    def exit(self) -> Exit:
        """Exit status: a fault fails; what nobody knows is inconclusive."""
        if any(each.is_fault for each in self.findings):
            return Exit.FAILED
        return Exit.INCONCLUSIVE if self.silent else Exit.OK

    @property
    def verdict(self) -> str:
        """The word for the exit status."""
        return {Exit.OK: "pass", Exit.FAILED: "fail"}.get(self.exit, "inconclusive")


def check_weights(config: Config, kind: str) -> Exit:
    """Load every stage of the scope by the port, compare, show and log; see `Checked.exit`.

    Raises UserError where the port says nothing about its weights at all.
    """
    from layerparity.tracking.store import open_store

    plan = plan_run(config)
    terminal.say_loading(config)
    store = open_store(config.tracking)
    with open_backend.opened(config) as backend:
        checkpoint, scope = plan.checkpoint, plan.scope
        port = _built(plan, backend)
        label = open_port.label(config.port)
        console.say(f"weights of {config.model.name}, {scope.describe()}, as port {label} has them")
        checked = _loaded(port, checkpoint, scope.stages)
    if len(checked.silent) == len(scope.stages):
        raise UserError(
            f"The port {label} does not say what weights its graph holds: give it "
            "effective_weights(stage), see docs/weights.md."
        )
    checked.findings = diff_side(
        checked.prints, _lost(checkpoint, checked), checked.used, "candidate"
    )
    _show(checked)
    _log(config, store, scope, checked, kind)
    return checked.exit


def _built(plan: RunPlan, backend: Backend) -> Port:
    # Nothing is observed: what a graph holds does not depend on it.
    assets = Assets(plan.checkpoint, plan.family, backend, plan.config, Wanted("nothing", ()))
    port = open_port.build(plan.config.port, assets)
    port.place(plan.scope.stages)
    for warning in backend.warnings:
        console.say(f"note: {warning}")
    return port


def _loaded(port: Port, checkpoint: Checkpoint, stages: tuple[str, ...]) -> Checked:
    """Load one stage after the other, each released before the next."""
    from layerparity.model.prints import against

    checked = Checked()
    with console.progress("stages", len(stages)) as bar:
        for stage in stages:
            checked.used[stage] = port.load(stage)
            checked.prints[stage] = against(checkpoint, port.effective_weights(stage))
            port.release(stage)
            if not checked.prints[stage]:
                checked.silent.append(stage)
            bar.step(stage)
    return checked


def _lost(checkpoint: Checkpoint, checked: Checked) -> dict[str, dict[str, WeightPrint]]:
    """Return the prints of stored tensors that a stage needs and the port says nothing of."""
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.prints import print_of
    from layerparity.model.skeleton import Skeleton

    found: dict[str, dict[str, WeightPrint]] = {}
    try:
        skeleton = Skeleton(read_config(checkpoint.config), torch.float32, "eager", None)
        for stage, held in checked.prints.items():
            for name in set(skeleton.sources(checkpoint, stage)) - held.keys() if held else ():
                value = checkpoint.value(name)
                found.setdefault(stage, {})[name] = print_of(value)
    except UserError as error:
        # A port may know architectures and formats that we cannot build ourselves.
        console.say(f"note: tensors that the port does not name are not looked for: {error}")
    return found


def _show(checked: Checked) -> None:
    faults = [each for each in checked.findings if each.is_fault]
    for stage in checked.silent:
        console.say(f"note: the port says nothing of {stage}")
    for note in (each for each in checked.findings if not each.is_fault):
        console.say(f"note: {note.text}")
    if not faults:
        stages = len(checked.prints) - len(checked.silent)
        console.say(f"{checked.tensors} tensors of {stages} stages hold the checkpoint's values.")
        return
    rows = [(each.what, each.count, each.text) for each in faults]
    rest = [("...", len(rows) - _SHOWN, "and more in weights_check.json")]
    shown = rows if len(rows) <= _SHOWN else [*rows[:_SHOWN], *rest]
    console.table(f"FAIL at {faults[0].text}", ("what", "tensors", "where and how"), shown)


def _log(config: Config, store: Store, scope: Scope, checked: Checked, kind: str) -> None:
    faults = [each for each in checked.findings if each.is_fault]
    label = open_port.label(config.port)
    tags = {
        "what": "weights",
        "verdict": checked.verdict,
        "first_failure": faults[0].text if faults else "",
        "model": config.model.name,
        "scope": scope.describe(),
        "port": label,
        "dtype": config.dtype.value,
    }
    name = config.name or f"weights-{label.replace(' ', '-')}"
    wrong = sum(each.count for each in faults)
    with store.start(name, kind, tags, {"port": label, "model": config.model.name}) as active:
        active.log_text(_as_json(checked), "weights_check.json")
        if checked.findings:
            active.log_table(_as_table(checked.findings), "weights_findings.json")
        metrics = {"summary/tensors": checked.tensors, "summary/wrong tensors": wrong}
        active.log_metrics([(key, float(value), 0) for key, value in metrics.items()])
    console.say(f"run:    {active.url}")
    say_served(config.tracking)


def _as_json(checked: Checked) -> str:
    raw: dict[str, Any] = {
        "verdict": checked.verdict,
        "tensors": checked.tensors,
        "silent": checked.silent,
        "findings": [asdict(each) for each in checked.findings],
        "wrong": {
            stage: {name: asdict(each) for name, each in held.items() if each.expected is not None}
            for stage, held in checked.prints.items()
        },
    }
    return json.dumps(raw, indent=1)


def _as_table(findings: list[WeightFinding]) -> dict[str, list[Any]]:
    columns = ("what", "layer", "component", "name", "count", "text")
    return {column: [getattr(each, column) for each in findings] for column in columns}
