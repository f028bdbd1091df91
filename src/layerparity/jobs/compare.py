"""Compare a golden run with a candidate, judge every site, and keep the verdict with its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.anatomy.blocks import Blocks
from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.judge.weights_diff import diff_side
from layerparity.record.findings import WeightCheck
from layerparity.report import weight_check
from layerparity.run import open_port
from layerparity.run.loaded_weights import load_weights
from layerparity.run.prepare import plan_run
from layerparity.run.terminal import say_loading
from layerparity.settings.config import Config, What
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun


@dataclass
class Settings:
    """conf/job/compare.yaml; the name maps are for folders of dumps."""

    name: str = "compare"
    golden_names: str | None = key(None, "name map of a folder of dumps, a JSON file")
    candidate_names: str | None = key(None, "name map of a folder of dumps, a JSON file")


def run(config: Config) -> Exit:
    """Compare two runs, or two sets of runs; return the exit status of the verdict."""
    from layerparity.judge.choose import chosen_sides, unfinished_sweeps
    from layerparity.tracking.store import open_store

    if config.what is What.weights:
        return _check_weights(config)
    store = open_store(config.tracking)
    golden, candidate = chosen_sides(config, store)
    # Torch is loaded only for runs that exist.
    from layerparity.judge.conclude import conclude
    from layerparity.judge.model_limits import with_limits
    from layerparity.report.keep import keep_verdict
    from layerparity.run.steps import settings_to_judge

    console.say(f"golden:    {_called(golden)}\ncandidate: {_called(candidate)}")
    with console.counting("sites") as count:
        verdict = conclude(
            golden,
            candidate,
            with_limits(config.tolerance, store, candidate),
            progress=count,
            settings=settings_to_judge(config),
            unfinished=unfinished_sweeps(store, candidate),
            portrait=True,
        )
    keep_verdict(config, store, verdict, candidate)
    return verdict.exit


def _called(runs: Sequence[StoredRun]) -> str:
    first = f"{runs[0].name} {runs[0].id[:8] or runs[0].folder}"
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more of its sweep"


def _check_weights(config: Config) -> Exit:
    """Hold what a port loads against the checkpoint, without a forward pass (what=weights)."""
    from layerparity.report.keep import KIND
    from layerparity.tracking.links import say_served
    from layerparity.tracking.store import open_store

    plan = plan_run(config)
    say_loading(config)
    store = open_store(config.tracking)
    loaded = load_weights(plan)
    blocks = Blocks.of(str(plan.checkpoint.config.get("model_type")), {})
    findings = diff_side(loaded.prints, loaded.unnamed, loaded.used, "candidate", blocks)
    check = WeightCheck(loaded.prints, tuple(findings))
    for sentence in weight_check.sentences(check):
        console.say(sentence)
    if check.faults:
        console.table(*weight_check.fault_table(check))
    label = open_port.label(config.port)
    tags = {
        "what": "weights",
        "verdict": check.verdict,
        "first_failure": check.faults[0].text if check.faults else "",
        "model": config.model.name,
        "scope": plan.scope.describe(),
        "port": label,
        "dtype": config.dtype.value,
    }
    name = config.name or f"weights-{label.replace(' ', '-')}"
    with store.start(name, KIND, tags, {"port": label, "model": config.model.name}) as active:
        active.log_text(json.dumps(check.to_dict(), indent=1), "weights_check.json")
        if check.findings:
            active.log_table(weight_check.findings_table(check.findings), "weights_findings.json")
        wrong = sum(each.count for each in check.faults)
        metrics = {"summary/tensors": check.tensors, "summary/wrong tensors": wrong}
        active.log_metrics([(key, float(value), 0) for key, value in metrics.items()])
    console.say(f"run:    {active.url}")
    say_served(config.tracking)
    return check.exit
