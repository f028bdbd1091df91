"""Say how a side agrees with itself: a line for each axis and size, and what it comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerparity.ground.errors import Exit
from layerparity.ground.numeral import numeral
from layerparity.judge.invariance import SelfComparison, SiteDifference, name_of
from layerparity.mistakes.replayed import Replayed
from layerparity.record.verdict import Outcome
from layerparity.report.reasons import breach_text, reason
from layerparity.report.study import Study

COLUMNS = ("axis", "size", "equal", "first difference", "token", "largest", "R (limit)", "")
# What passes: equal bits alone, or what is within the noise floor as well.
BITS, FLOOR = "bits", "floor"
EQUAL = "equal"
_GRAVEST = (Outcome.FAIL, Outcome.MISSING, Outcome.INCONCLUSIVE, Outcome.PASS)
_ENDS = {Outcome.PASS: "within the floor", Outcome.FAIL: "leaves the floor"}


class InvarianceLine(NamedTuple):
    """One axis and size, how the side agrees with itself there, and which mistakes were tried.

    ``cached`` says whether what is cached of the first wrong block is right.
    """

    axis: str
    size: int
    detail: str
    found: SelfComparison
    replayed: Replayed = Replayed()
    cached: str = ""

    @property
    def name(self) -> str:
        """The axis, its size and which side of it."""
        return name_of(self.axis, self.size, self.detail)

    @property
    def ending(self) -> str:
        """How it ended, in a few words."""
        if self.found.first is None:
            return EQUAL
        return _ENDS.get(self.found.outcome, "not judged")

    def cells(self) -> tuple[str, ...]:
        """Return its row of the table."""
        found, first = self.found, self.found.first
        start = (self.axis, name_of("", self.size, self.detail), f"{found.equal} of {found.sites}")
        if first is None:
            return (*start, "", "", "", "", self.ending)
        ratio = "-"
        if found.ratio is not None:
            limit = "" if found.limit is None else f" ({numeral(found.limit)})"
            ratio = f"{numeral(found.ratio)}{limit}"
        return (*start, str(first.site), place(first), size(first), ratio, self.ending)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found, first = self.found, self.found.first
        return {
            "axis": self.axis,
            "size": self.size,
            "detail": self.detail,
            "sites": found.sites,
            "equal": found.equal,
            "ending": self.ending,
            "failing": found.failing,
            "R": found.ratio,
            "cached": self.cached,
            "causes": [fault.cause for fault in self.replayed.shown],
            "R_site": None if found.row is None else str(found.row.site),
            "limit": found.limit,
            "first": None
            if first is None
            else {
                "site": str(first.site),
                "layer": first.site.layer,
                "component": first.site.component,
                "sequence": first.sequence,
                "token": first.position,
                "tokens": first.tokens,
                "largest_difference": first.largest,
            },
        }


def gravest_first(lines: Sequence[InvarianceLine]) -> list[InvarianceLine]:
    """Return the lines with a difference: what fails, lacks a site, was not judged, and passes."""
    differing = [each for each in lines if each.found.first is not None]
    return sorted(differing, key=lambda each: _GRAVEST.index(each.found.outcome))


@dataclass(frozen=True)
class InvarianceReport:
    """All lines of one side; ``left_out`` says by axis why it was not varied.

    ``demand`` is `BITS` or `FLOOR`; ``follows`` the command that most likely comes next. Of what
    is left out, the port itself failed at the axes that are ``broken``: nothing is known of them.
    """

    lines: Sequence[InvarianceLine]
    left_out: Mapping[str, str]
    demand: str
    follows: str
    broken: Sequence[str] = ()

    @property
    def differing(self) -> list[InvarianceLine]:
        """The lines with a difference: those that leave the floor, were not judged, and hold it."""
        return gravest_first(self.lines)

    @property
    def exit(self) -> Exit:
        """How the job ends: by all lines, and by what is demanded of them."""
        ends = {each.found.outcome for each in self.differing}
        if Outcome.FAIL in ends or (ends and self.demand == BITS):
            return Exit.FAILED
        untold = ends - {Outcome.PASS} or self.broken
        return Exit.INCONCLUSIVE if untold else Exit.OK

    @property
    def headline(self) -> str:
        """The answer in a sentence: where the side first stops being equal to itself."""
        if not self.differing:
            return f"all {len(self.lines)} variations are equal to the bit"
        worst, equal = self.differing[0], len(self.lines) - len(self.differing)
        row, first = worst.found.row, worst.found.first
        assert first is not None, "a line that differs has a first difference"
        ends = f"{worst.name} differs from {first.site} on"
        if worst.found.outcome is Outcome.PASS:
            ends += "; all that differ are within the floor"
        elif worst.found.outcome is Outcome.FAIL and row is not None:
            ends = f"{worst.name} leaves the floor at {row.site}"
        else:
            ends += ", and was not judged"
        asked = ", and job.demand=bits asks for all" if self.demand == BITS else ""
        return f"{equal} of {len(self.lines)} variations are equal to the bit{asked}; {ends}"

    @property
    def notes(self) -> list[str]:
        """What leaves the floor and where, what was not judged, and what was left out."""
        said = []
        for each in self.differing:
            row, at = each.found.row, each.found.at
            if each.found.outcome is Outcome.PASS:
                continue
            if each.found.outcome is not Outcome.FAIL and each.found.off is not None:
                said.append(
                    f"{each.name}: not judged: the run itself is off at {each.found.off}, make it "
                    "again first, or on another device"
                )
            elif row is not None and at is not None:
                why = breach_text(row.breaches[0], row.metrics) if row.breaches else reason(row)
                more = f"; so do {each.found.failing - 1} more" if each.found.failing > 1 else ""
                token = f", token {place(at)}" if place(at) else ""
                said.append(f"{each.name}: {row.site}{token}: {why}{more}")
                said += [f"{each.name}: {each.cached}"] if each.cached else []
                said += _causes(each)
        if any(each.axis == "repeat" for each in self.differing) and len(said) > 1:
            said.append(
                "the same again differs: what the other lines show may be no more than that"
            )
        if any(each.found.has_no_floor and each.found.routed_apart for each in self.differing):
            said.append(
                "a chain that is routed apart is not judged: make a golden of this text, and give "
                "job=invariance inputs=golden feed=isolated"
            )
        how = {axis: "broken" if axis in self.broken else "left out" for axis in self.left_out}
        return said + [f"{how[axis]}: {axis} ({why})" for axis, why in self.left_out.items()]

    def study(self) -> Study:
        """Return what is kept and shown: R, and how many sites differ, by size."""
        points: list[tuple[str, float, int]] = []
        for each in self.lines:
            name = f"invariance/{each.axis} {each.detail}".strip()
            differing = float(each.found.sites - each.found.equal)
            points.append((f"{name} sites that differ", differing, each.size))
            # Where nothing was judged, or is a number, there is no R: 0 is that of what is equal.
            if each.found.ratio is not None or each.found.first is None:
                points.append((f"{name} R", each.found.ratio or 0.0, each.size))
        return Study(
            "Against itself",
            COLUMNS,
            [each.cells() for each in self.lines],
            [*self.notes, self.headline],
            points,
            self.exit,
            {"invariance.json": self._json()},
            self.tags,
            self.follows,
        )

    def _json(self) -> str:
        record = {
            "verdict": self.exit.name.lower(),
            "demand": self.demand,
            "variations": [each.to_dict() for each in self.lines],
            "left_out": dict(self.left_out),
            "broken": list(self.broken),
            "next": self.follows,
        }
        return json.dumps(record, indent=1)

    @property
    def tags(self) -> dict[str, str]:
        """What the job's run is found by: how it ended, the first difference, and the text."""
        first = self.differing[0].found.first if self.differing else None
        return {
            "verdict": self.exit.name.lower(),
            "first": "" if first is None else f"{self.differing[0].name}: {first.site}",
            "mlflow.note.content": "\n\n".join([self.headline, *self.notes]),
        }


def _causes(line: InvarianceLine) -> list[str]:
    """Return what is said of the mistakes that were tried: which it is, or that it is none."""
    tried = line.replayed
    if not tried.shown and not tried.refuted:
        return []
    if not tried.shown:
        return [
            f"{line.name}: none of {len(tried.refuted)} known mistakes of state gives these numbers"
        ]
    count = len(tried.refuted)
    others = f"; {count} others do not" if count > 1 else "; another one does not" * count
    return [
        f"{line.name}: shown: {each.sentence} (planted in transformers' own block, it gives these "
        f"numbers{others})"
        for each in tried.causes
    ]


def place(first: SiteDifference) -> str:
    """Return the first token that differs, with its sequence where that is not the first."""
    if first.position is None:
        return ""
    row = f" of sequence {first.sequence}" if first.sequence else ""
    return f"{first.position}{row}"


def size(first: SiteDifference) -> str:
    """Return the largest difference at a site; of choices, how many tokens differ."""
    if first.largest is not None:
        return numeral(first.largest)
    return f"{first.tokens} token{'s' * (first.tokens != 1)}"
