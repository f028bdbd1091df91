"""Comparison: everything a report, a table or a later judgement needs of two compared runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from layerparity.verdict import Outcome, Row, Verdict


@dataclass(frozen=True)
class Side:
    """One of the two runs: where to find it and what it really ran on."""

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


@dataclass
class Comparison:
    """Two sides, a row for every site that was asked for, and the verdict over them.

    ``token_errors`` holds, for each floating site by its text, the relative L2 error of every real
    (unpadded) token in batch-major order: ``||candidate - golden|| / ||golden||`` per token.
    """

    golden: Side
    candidate: Side
    tolerance: str
    limits: dict[str, float]
    rows: list[Row]
    verdict: Verdict
    token_errors: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

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
        }
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        verdict = raw["verdict"]
        verdict.update(outcome=Outcome(verdict["outcome"]), notes=tuple(verdict["notes"]))
        return cls(
            golden=Side(**raw["golden"]),
            candidate=Side(**raw["candidate"]),
            tolerance=raw["tolerance"],
            limits=raw["limits"],
            rows=[Row.from_dict(row) for row in raw["rows"]],
            verdict=Verdict(**verdict),
            token_errors=raw["token_errors"],
            warnings=raw["warnings"],
        )
