"""Masters: stored runs are concluded of as they were when they were stored; see masters/make.py.

A difference that is wanted stands in masters/exceptions.json: by case, then by field or site, or a
shell pattern of sites, what is concluded ``now``, and the ``reason``. What a dictionary there does
not name is as it was; an empty one is empty.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from masters.adapter import conclude, concluded, verdict_of
from stories import Story, contradictions

MASTERS = Path(__file__).resolve().parent / "masters"
RUNS = MASTERS / "runs"
CASES = sorted(path.stem for path in (MASTERS / "expected").glob("*.json"))
GIVEN = ("golden", "candidate", "tolerance")
# Words for the reader.
WORDS = ("reason", "notes")
RELATIVE, ABSOLUTE = 1e-5, 1e-12


def read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, object_pairs_hook=once)
    return found


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose names all stand once: of two, JSON would keep the last, silently."""
    found = dict(pairs)
    assert len(found) == len(pairs), f"a name stands twice among {[name for name, _ in pairs]}"
    return found


def flat(concluded: dict[str, Any]) -> dict[str, Any]:
    """Return fields and rows side by side; of causes their names, for their shares are measured."""
    fields = {k: v for k, v in concluded.items() if k != "rows"}
    if "causes" in fields:
        fields["causes"] = [name for name, _ in fields["causes"]]
    return {**fields, **concluded["rows"]}


def apart(place: str, due: Any, found: Any) -> Iterator[str]:
    """Yield where plain values differ; what is not there is None. Words are not looked at."""
    if isinstance(due, dict) and isinstance(found, dict):
        for name in dict.fromkeys([*due, *found]):
            if name not in WORDS:
                yield from apart(f"{place} {name}", due.get(name), found.get(name))
    elif isinstance(due, list) and isinstance(found, list | tuple) and len(due) == len(found):
        for index, (left, right) in enumerate(zip(due, found, strict=True)):
            yield from apart(f"{place} {index}", left, right)
    elif not equal(due, found):
        yield f"{place} is {found!r}, and should be {due!r}"


def equal(left: Any, right: Any) -> bool:
    """Say whether two plain values are equal, numbers nearly."""
    if not (is_number(left) and is_number(right)):
        return type(left) is type(right) and bool(left == right)
    both_nan = math.isnan(left) and math.isnan(right)
    return both_nan or math.isclose(left, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def merged(before: Any, now: Any) -> Any:
    """Return a value as an exception changes it; what it does not name of a dictionary stays."""
    if not (isinstance(before, dict) and isinstance(now, dict) and now):
        return now
    return {**before, **{name: merged(before.get(name), each) for name, each in now.items()}}


def differences(
    expected: dict[str, Any], found: dict[str, Any], exceptions: dict[str, Any]
) -> list[str]:
    """Return a line for each value that is not as expected, and each exception that is idle."""
    told = []
    keys = dict.fromkeys([*expected, *found])
    patterns = {each: fnmatch.filter(keys, each) for each in exceptions if "*" in each}
    named = {key: exceptions[each] for each, hits in patterns.items() for key in hits}
    exceptions = named | {k: v for k, v in exceptions.items() if not patterns.get(k)}
    for key in keys:
        before, after = expected.get(key), found.get(key)
        excepted = key in exceptions
        due = merged(before, exceptions[key]["now"]) if excepted else before
        told += apart(key, due, after)
        if excepted and not any(apart(key, before, after)):
            told.append(f"{key} needs no exception: take it out of exceptions.json")
    strangers = exceptions.keys() - expected.keys() - found.keys()
    return [*told, *(f"{key} is excepted, and is no field or site" for key in strangers)]


@pytest.fixture(scope="module")
def exceptions() -> dict[str, Any]:
    return read(MASTERS / "exceptions.json")


@pytest.mark.parametrize("name", CASES)
def test_a_stored_comparison_ends_as_before_and_contradicts_nothing(
    name: str, exceptions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A golden names its model's configuration by a path from here.
    monkeypatch.chdir(MASTERS)
    case = read(MASTERS / "expected" / f"{name}.json")
    golden, candidate, tolerance = (case.pop(key) for key in GIVEN)
    sides = [[RUNS / each for each in side] for side in (golden, candidate)]
    if golden:
        verdict = verdict_of(*sides, tolerance)
        found = concluded(verdict)
        assert list(contradictions(Story(verdict))) == []
    else:
        found = conclude(*sides, tolerance)
    told = differences(flat(case), flat(found), exceptions.get(name, {}))
    assert told == [], "\n".join(told[:20])


def test_every_case_is_there_and_every_exception_has_one(exceptions: dict[str, Any]) -> None:
    from masters.cases import CASES as LISTED

    assert sorted(LISTED) == CASES
    assert exceptions.keys() <= set(CASES)
    listed = [each for case in exceptions.values() for each in case.values()]
    assert all(each.keys() == {"now", "reason"} for each in listed)
