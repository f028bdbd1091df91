"""Group a comparison's rows by block, and by module outside the blocks, in forward order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from layerparity.anatomy.site import Place
from layerparity.record.guilt import Guilt
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.record.weights import WeightFinding
from layerparity.report.gauge import Limits, severity
from layerparity.report.reasons import reason_of_steps

_RANK = {
    Outcome.FAIL: 4,
    Outcome.INCONCLUSIVE: 3,
    Outcome.MISSING: 2,
    Outcome.PASS: 1,
    Outcome.SKIPPED: 0,
}
_FEW = 16
_SHORT = {"embed_tokens": "embed", "lm_head": "head"}


def worst(rows: Sequence[Row], limits: Limits) -> Row:
    """Return the row that ended worst, and among equals the one that takes most of its limit."""
    return max(rows, key=lambda row: (_RANK[row.outcome], *severity(row, limits)))


def first_to_fail(rows: Sequence[Row]) -> Row | None:
    """Return the failing row that a forward pass reaches first, or None where nothing fails.

    The rows of one pass stand in its order.
    """
    failed = [row for row in rows if row.outcome is Outcome.FAIL]
    return min(failed, key=lambda row: row.site.pass_order()[0], default=None)


def forward_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by place in the model; the phases and decode steps of one site stand together.

    The rows of one pass stand in its order already.
    """
    places: dict[tuple[str, str], int] = {}
    for row in rows:
        places.setdefault((row.site.path, row.site.end), len(places))
    return sorted(
        rows,
        key=lambda row: (
            row.site.pass_order()[1:],
            places[row.site.path, row.site.end],
            row.site.pass_order()[0],
        ),
    )


@dataclass(frozen=True)
class Stage:
    """One block, or one module outside them, with its rows (at least one) in forward order.

    ``guilt`` is what goes wrong in it by itself, and ``leads`` says that this is the first wrong
    place of all. ``faults`` are wrong weights of it, ``limits`` what its rows are judged by.
    """

    key: str
    layer: int | None
    rows: tuple[Row, ...]
    limits: Limits
    guilt: Guilt | None = None
    leads: bool = False
    faults: tuple[WeightFinding, ...] = ()

    @property
    def name(self) -> str:
        """What a reader calls it: ``layer 3`` or ``embed_tokens``."""
        return self.key if self.layer is None else f"layer {self.layer}"

    @property
    def tick(self) -> str:
        """Shortest label, for an axis: ``3`` or ``embed``."""
        return _SHORT.get(self.key, self.key) if self.layer is None else str(self.layer)

    @cached_property
    def worst(self) -> Row:
        """The row that ended worst."""
        return worst(self.rows, self.limits)

    @cached_property
    def shown(self) -> Row:
        """The row that stands for the stage: what shows its guilt, else the first to fail.

        Where none fails it is the worst. What comes after the first failure may only follow from
        it, however large it is.
        """
        site = self.guilt.site if self.guilt is not None else None
        shows = next((row for row in self.rows if row.site == site), None)
        return shows or first_to_fail(self.rows) or self.worst

    @property
    def weight(self) -> WeightFinding | None:
        """What is wrong with its weights, where no site of it fails."""
        if self.worst.outcome is Outcome.FAIL or not self.faults:
            return None
        return (self.guilt.weights if self.guilt is not None else None) or self.faults[0]

    @property
    def outcome(self) -> Outcome:
        """How the stage ends: as its worst row, and a wrong weight fails it as well."""
        return Outcome.FAIL if self.faults else self.worst.outcome


def beside(row: Row, stage: Stage) -> list[Row]:
    """Return the rows of a stage in the phase and step of one of them, in forward order.

    What was skipped is left out.
    """
    return [
        each
        for each in stage.rows
        if (each.site.phase, each.site.step) == (row.site.phase, row.site.step)
        and (each.outcome is not Outcome.SKIPPED or each is row)
    ]


def table_rows(stage: Stage) -> tuple[list[Row], list[tuple[int, str]]]:
    """Return the rows of a stage's table, and how many were skipped alike, with their reasons.

    A golden's decode steps are hundreds: where many sites were skipped for one reason, the table
    says so in a line.
    """
    words = [reason_of_steps(row) for row in stage.rows]
    skipped = Counter(
        said for row, said in zip(stage.rows, words, strict=True) if row.outcome is Outcome.SKIPPED
    )
    many = {said: count for said, count in skipped.items() if count > _FEW}
    rows = [
        row
        for row, said in zip(stage.rows, words, strict=True)
        if row.outcome is not Outcome.SKIPPED or said not in many
    ]
    return rows, [(count, said) for said, count in many.items()]


def stages(verdict: Verdict) -> list[Stage]:
    """Group a verdict's rows by stage, in forward order; nothing is dropped."""
    groups: dict[str, list[Row]] = {}
    for row in forward_order(verdict.rows):
        groups.setdefault(row.site.place.stage, []).append(row)
    first = [verdict.guilty] if verdict.guilty is not None else []
    guilts = {each.place.stage: each for each in (*first, *verdict.further)}
    faults: dict[str, list[WeightFinding]] = {}
    for each in verdict.weights:
        stage = each.stage if each.layer is None else str(Place(each.layer))
        faults.setdefault(stage, []).extend([each] if each.is_fault else [])
    return [
        Stage(
            key,
            rows[0].site.layer,
            tuple(rows),
            verdict.limits,
            guilts.get(key),
            verdict.guilty is not None and guilts.get(key) is verdict.guilty,
            tuple(faults.get(key, ())),
        )
        for key, rows in groups.items()
    ]


def first_wrong(found: Sequence[Stage]) -> Stage | None:
    """Return the stage of the first wrong place, else the first that fails; None for none."""
    failing = [stage for stage in found if stage.outcome is Outcome.FAIL]
    return next((stage for stage in failing if stage.leads), next(iter(failing), None))


@dataclass(frozen=True)
class Fold:
    """Neighbouring blocks that end alike, told in one line; most often just one stage."""

    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """``layer 3``, ``layers 4-61`` or ``embed_tokens``."""
        first, last = self.stages[0], self.stages[-1]
        return first.name if len(self.stages) == 1 else f"layers {first.layer}–{last.layer}"

    @cached_property
    def worst(self) -> Row:
        """The row that ended worst."""
        return worst([stage.worst for stage in self.stages], self.stages[0].limits)

    @property
    def shown(self) -> Row:
        """The row that stands for all: where one fails the first stage's, else the worst."""
        return self.stages[0].shown if self.outcome is Outcome.FAIL else self.worst

    @property
    def weight(self) -> WeightFinding | None:
        """What is wrong with the first stage's weights, where no site of it fails."""
        return self.stages[0].weight

    @property
    def beside(self) -> Row | None:
        """The worst row, where it is another one than `shown`."""
        return None if self.worst is self.shown else self.worst

    @property
    def outcome(self) -> Outcome:
        """How all of the stages end."""
        return self.stages[0].outcome


def fold(found: Sequence[Stage]) -> list[Fold]:
    """Put neighbouring blocks of one outcome together where there are too many to read.

    The first wrong stage and what stands outside the blocks keep lines of their own, and what goes
    wrong by itself is put together with its like only.
    """
    if len(found) <= _FEW:
        return [Fold((stage,)) for stage in found]
    first = first_wrong(found)
    groups: list[list[Stage]] = []
    for stage in found:
        last = groups[-1][-1] if groups else None
        if last is not None and last is not first and _alike(last, stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return [Fold(tuple(group)) for group in groups]


def _alike(before: Stage, after: Stage) -> bool:
    if before.layer is None or after.layer is None:
        return False
    alike = after.outcome is before.outcome and (after.guilt is None) is (before.guilt is None)
    return alike and after.layer == before.layer + 1
