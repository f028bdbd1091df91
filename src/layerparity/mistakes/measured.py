"""How often what a rule says was true, measured over the corpus of faulty runs.

`measured.json` beside this file is what ``benchmarks/corpus.py --to`` writes: by rule and grade,
how often it was said and how often that was true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from layerparity.record.guilt import Cause

FILE = Path(__file__).with_name("measured.json")
# What is true less often is not said: then no known cause fits.
LIMIT = 0.5
# So many cases of its grade count beside a rule's own.
_SHARED = 4.0
Counts = Mapping[str, Mapping[str, tuple[int, int]]]


@cache
def counts() -> dict[str, dict[str, tuple[int, int]]]:
    """Return (said, true) by rule and grade."""
    raw = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        rule: {grade: (int(said), int(true)) for grade, (said, true) in grades.items()}
        for rule, grades in raw.items()
    }


def share_of(cause: Cause) -> float:
    """Return how often a cause of its rule and grade was true, 0 to 1.

    A rule's own cases are few: those of all rules of the grade count as a few more."""
    return share(counts(), cause.id, cause.grade)


def cases_of(cause: Cause) -> int:
    """Return how often the rule of a cause said one of its grade when that was measured."""
    return counts().get(cause.id, {}).get(cause.grade, (0, 0))[0]


def share(known: Counts, rule: str, grade: str) -> float:
    """Return the share of true ones for a rule and grade, 0 to 1: (true + 4 p) / (said + 4).

    p is the share of all rules of the grade, of which (1 + true) / (2 + said) is expected to be
    true (Laplace 1814).
    """
    all_said = sum(grades[grade][0] for grades in known.values() if grade in grades)
    all_true = sum(grades[grade][1] for grades in known.values() if grade in grades)
    pooled = (1 + all_true) / (2 + all_said)
    said, true = known.get(rule, {}).get(grade, (0, 0))
    return (true + _SHARED * pooled) / (said + _SHARED)
