"""Comparison: everything a report, a table or a later judgement needs of two compared runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from layerparity.ground.profile import RunProfile
from layerparity.record.findings import Coverage, WeightFinding
from layerparity.record.portrait import Portrait
from layerparity.record.verdict import Outcome, Row, Verdict


@dataclass(frozen=True)
class Made:
    """How one run of a side was made.

    ``named`` is its id, or its folder. ``settings`` are the keys of a command line that differ from
    the defaults. ``names`` is a dump's name map, where it is not in the dump's folder.
    """

    named: str
    proved: bool
    stages: tuple[str, ...]
    settings: dict[str, Any]
    names: str = ""


@dataclass(frozen=True)
class Side:
    """One of the two runs: where to find it, how it was made and what it really ran on.

    ``named`` names all of it on a command line: a run's id, the id of the sweep or a folder; it is
    empty where nothing does. ``made`` holds its runs, oldest first. ``profile`` says where
    their time went, added up by stage; None where they keep none.
    """

    run: str
    name: str
    backend: str
    device: str
    dtype: str
    port: str
    url: str = ""
    model: str = ""
    scope: str = ""
    feed: str = ""
    named: str = ""
    made: tuple[Made, ...] = ()
    profile: RunProfile | None = None


@dataclass
class Comparison:
    """Two sides, a row for every site that was asked for, and the verdict over them.

    ``token_errors`` holds, for each floating site by its text, the relative L2 error of every real
    (unpadded) token in batch-major order: ``||candidate - golden|| / ||golden||`` per token.
    ``settings`` are the keys of the compare command that differ from the defaults, its two sides
    left out. ``profiles`` holds, for each failed site, what its groups (heads, channels, experts,
    positions) deviate by. ``weights`` are the findings on the weights that both graphs really used;
    ``coverage`` says what of the model was never exercised. ``guilty`` is the place that went wrong
    first, ``answer`` says so with the likeliest cause and the evidence, and ``portrait`` shows it.
    """

    golden: Side
    candidate: Side
    tolerance: str
    limits: dict[str, float]
    rows: list[Row]
    verdict: Verdict
    token_errors: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    weights: list[WeightFinding] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    profiles: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    guilty: str = ""
    answer: Answer | None = None
    portrait: Portrait | None = None

    @property
    def headline(self) -> str:
        """The answer as text, a line for each part; empty where nothing went wrong."""
        return self.answer.text if self.answer else ""

    def to_json(self) -> str:
        """Return the comparison as JSON text that `from_json` reads back."""
        raw = {
            "golden": asdict(self.golden),
            "candidate": asdict(self.candidate),
            "tolerance": self.tolerance,
            "limits": self.limits,
            "rows": [row.to_dict() for row in self.rows],
            "verdict": {**asdict(self.verdict), "outcome": self.verdict.outcome.value},
            "token_errors": self.token_errors,
            "warnings": self.warnings,
            "settings": self.settings,
            "weights": [asdict(each) for each in self.weights],
            "coverage": asdict(self.coverage),
            "profiles": self.profiles,
            "guilty": self.guilty,
            "answer": asdict(self.answer) if self.answer else None,
            "portrait": asdict(self.portrait) if self.portrait else None,
        }
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        verdict = raw["verdict"]
        verdict.update(outcome=Outcome(verdict["outcome"]))
        return cls(
            golden=_side(raw["golden"]),
            candidate=_side(raw["candidate"]),
            tolerance=raw["tolerance"],
            limits=raw["limits"],
            rows=[Row.from_dict(row) for row in raw["rows"]],
            verdict=Verdict(**verdict),
            token_errors=raw["token_errors"],
            warnings=raw["warnings"],
            settings=raw["settings"],
            weights=[WeightFinding(**each) for each in raw.get("weights", [])],
            coverage=Coverage.from_dict(raw["coverage"]) if "coverage" in raw else Coverage(),
            profiles=raw.get("profiles", {}),
            guilty=raw.get("guilty", ""),
            answer=Answer.from_dict(raw["answer"]) if raw.get("answer") else None,
            portrait=Portrait.from_dict(raw["portrait"]) if raw.get("portrait") else None,
        )


def _side(raw: dict[str, Any]) -> Side:
    made = tuple(Made(**{**each, "stages": tuple(each["stages"])}) for each in raw["made"])
    profile = RunProfile.from_dict(raw["profile"]) if raw.get("profile") else None
    return Side(**{**raw, "made": made, "profile": profile})


_WIDTH = 10
# A line of ``next`` that is a remark, not a command; a shell passes over it.
REMARK = "# "


@dataclass(frozen=True)
class Answer:
    """What a comparison or a bisection found, each part apart.

    ``where`` is a sentence about the place. ``cause`` is the likeliest one, how sure it is said
    first; ``others`` are further ones. ``evidence`` are the observations, ``next`` the command
    lines that show it alone; one that begins with ``#`` is a remark on those after it.
    """

    where: str
    cause: str = ""
    others: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The answer as a terminal shows it: a label before each part, commands on own lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _labelled("where", [self.where])
        yield from _labelled("cause", [self.cause] if self.cause else [])
        yield from _labelled("or", self.others)
        yield from _labelled("evidence", [f"- {each}" for each in self.evidence])
        if self.next:
            yield "next"
        yield from (f"  {line}" for line in self.next)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Answer:
        """Read what `dataclasses.asdict` made of an answer."""
        parts = {name: tuple(raw[name]) for name in ("others", "evidence", "next")}
        return cls(raw["where"], raw["cause"], **parts)


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{_WIDTH}}{line}"
