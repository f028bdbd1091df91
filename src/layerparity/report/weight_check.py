"""What is said of a port's weights: a line where all are right, a table where they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from layerparity.record.findings import WeightCheck, WeightFinding

_SHOWN = 24


def sentences(check: WeightCheck) -> Iterator[str]:
    """Yield the notes, and what is right where nothing is wrong."""
    for stage in check.silent:
        yield f"note: the port says nothing of {stage}"
    for note in check.findings:
        if not note.is_fault:
            yield f"note: {note.text}"
    if not check.faults:
        stages = len(check.prints) - len(check.silent)
        yield f"{check.tensors} tensors of {stages} stages hold the checkpoint's values."


def fault_table(check: WeightCheck) -> tuple[str, Sequence[str], Sequence[Sequence[Any]]]:
    """Return the title, columns and rows of what is wrong; no rows where nothing is."""
    rows = [(each.what, each.count, each.text) for each in check.faults]
    rest = [("...", len(rows) - _SHOWN, "and more in weights_check.json")]
    shown = rows if len(rows) <= _SHOWN else [*rows[:_SHOWN], *rest]
    title = f"FAIL at {check.faults[0].text}" if rows else ""
    return title, ("what", "tensors", "where and how"), shown


def findings_table(findings: Sequence[WeightFinding]) -> dict[str, list[Any]]:
    """Return findings by column, as MLflow shows tables."""
    columns = ("what", "layer", "component", "name", "count", "text")
    return {column: [getattr(each, column) for each in findings] for column in columns}
