"""What was meant by a kind, a model or a verdict that no run of a store has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from layerparity.ground.errors import nearest
from layerparity.record.verdict import Outcome

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun

# What a comparison can end with, whether or not one here did.
_VERDICTS = (Outcome.PASS.value, Outcome.FAIL.value, Outcome.INCONCLUSIVE.value)
_SHOWN = 8


def hints(runs: Iterable[StoredRun], told: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each tag that is ``told``, by its name, and that no run has."""
    every, said = list(runs), []
    for name, value in told.items():
        # A sweep is found by the kind of its parts, too.
        tags = (name, "holds") if name == "kind" else (name,)
        there = sorted({each.tags[tag] for each in every for tag in tags if each.tags.get(tag)})
        if value is None or value in there:
            continue
        near = nearest(value, [*there, *(_VERDICTS if name == "verdict" else ())])
        listed = f" There is: {', '.join(there[:_SHOWN])}." if there and not near else ""
        said.append(f"No run has job.{name}={value}.{near}{listed}")
    return said
