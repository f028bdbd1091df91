"""What is said of a port's weights: a line where all are right, a table where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from layerparity.ground import console
from layerparity.ports.opening import open_port
from layerparity.record.weights import WeightCheck, WeightFinding
from layerparity.report.keep import KIND
from layerparity.report.weights import finding_text
from layerparity.settings.config import Config
from layerparity.tracking.links import say_served
from layerparity.tracking.store import Store

_SHOWN = 24


def keep_check(config: Config, store: Store, check: WeightCheck, scope: str) -> None:
    """Show a check of the weights of a ``scope``, such as ``full``, and keep it as a run."""
    for sentence in sentences(check):
        console.say(sentence)
    if check.faults:
        console.table(*fault_table(check))
    label = open_port.label(config.port)
    tags = {
        "what": "weights",
        "verdict": check.verdict,
        "first_failure": finding_text(check.faults[0]) if check.faults else "",
        "model": config.model.label,
        "scope": scope,
        "port": label,
        "dtype": config.dtype.value,
    }
    name = config.name or f"weights-{label.replace(' ', '-')}"
    with store.start(name, KIND, tags, {"port": label, "model": config.model.label}) as active:
        active.log_text(json.dumps(check.to_dict(), indent=1), "weights_check.json")
        if check.findings:
            active.log_table(findings_table(check.findings), "weights_findings.json")
        wrong = sum(each.count for each in check.faults)
        metrics = {"summary/tensors": check.tensors, "summary/wrong tensors": wrong}
        active.log_metrics([(key, float(value), 0) for key, value in metrics.items()])
    console.say(f"run:    {active.url}")
    say_served(config.tracking)


def sentences(check: WeightCheck) -> Iterator[str]:
    """Yield the notes, and what is right where nothing is wrong."""
    for stage in check.silent:
        yield f"note: the port says nothing of {stage}"
    if check.computed:
        more = f" and {len(check.computed) - 1} more" if check.computed[1:] else ""
        yield (
            f"note: the port computes with {check.computed[0]}{more}: what became of it only the "
            "sites of a run show"
        )
    for note in check.findings:
        if not note.is_fault:
            yield f"note: {finding_text(note)}"
    if not check.faults:
        stages = len(check.prints) - len(check.silent)
        yield f"{check.tensors} tensors of {stages} stages hold the checkpoint's values."


def fault_table(check: WeightCheck) -> tuple[str, Sequence[str], Sequence[Sequence[Any]]]:
    """Return the title, columns and rows of what is wrong; no rows where nothing is."""
    rows = [(each.what, each.count, finding_text(each)) for each in check.faults]
    rest = [("...", len(rows) - _SHOWN, "and more in weights_check.json")]
    shown = rows if len(rows) <= _SHOWN else [*rows[:_SHOWN], *rest]
    title = f"FAIL at {rows[0][2]}" if rows else ""
    return title, ("what", "tensors", "where and how"), shown


def findings_table(findings: Sequence[WeightFinding]) -> dict[str, list[Any]]:
    """Return findings by column, as MLflow shows tables."""
    columns = ("what", "layer", "component", "name", "count")
    table = {column: [getattr(each, column) for each in findings] for column in columns}
    return {**table, "text": [finding_text(each) for each in findings]}
