"""A series of comparisons: how each commit or version did, and which one was the first bad one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome

SERIES, REVISION = "series", "revision"
# The number behind the text of the tag ``worst``, and what it may be.
WORST, LIMIT = "worst_value", "worst_limit"
# What a comparison has as tags besides versions: what may have made the difference.
_DECIDES = {"revision": REVISION, "golden": "golden", "layerparity": "git_commit"}
_VERSION = "version."
_SHORT = 12
# Of a run without the tag.
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Turn:
    """Where a series stopped passing: its first bad comparison, and the good one before it.

    ``changed`` gives what was, and what is, of each thing that may have made the difference.
    """

    bad: StoredRun
    good: StoredRun | None
    changed: Mapping[str, tuple[str, str]]


def first_bad(series: Sequence[StoredRun]) -> Turn | None:
    """Return where a series, oldest first, stopped passing; None where its last one passes."""
    passes = [each.tags.get("verdict") == Outcome.PASS.value for each in series]
    if not series or passes[-1]:
        return None
    start = len(passes)
    while start and not passes[start - 1]:
        start -= 1
    good = series[start - 1] if start else None
    return Turn(series[start], good, changes(good, series[start]) if good else {})


def changes(before: StoredRun, after: StoredRun) -> dict[str, tuple[str, str]]:
    """Return what differs between two comparisons: revision, golden, versions; was and is."""
    versions = sorted({tag for run in (before, after) for tag in run.tags if _is_version(tag)})
    named = _DECIDES | {tag.removeprefix(_VERSION): tag for tag in versions}
    return {
        name: (_shortened(tag, before.tags), _shortened(tag, after.tags))
        for name, tag in named.items()
        if before.tags.get(tag) != after.tags.get(tag)
    }


def rows_of(series: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Return a row for each comparison, in the series' order, for a table or a program."""
    rows = []
    for before, run in zip([None, *series], series, strict=False):
        told = changes(before, run) if before is not None else {}
        changed = [f"{name} {is_}" for name, (_, is_) in told.items() if name != REVISION]
        rows.append(
            {
                "began": f"{run.start_time.astimezone():%Y-%m-%d %H:%M}",
                "revision": _shortened(REVISION, run.tags),
                "verdict": run.tags.get("verdict", run.status.lower()),
                "worst": run.tags.get("worst", ""),
                "first wrong place": run.tags.get("first_failure", ""),
                "changed": ", ".join(changed),
                "run": run.id[:8],
            }
        )
    return rows


def sentences(series: Sequence[StoredRun]) -> list[str]:
    """Return what a series, oldest first, tells in words: the first bad one, or that it passes."""
    turn = first_bad(series)
    if turn is None:
        return [_passing(series)] if series else []
    bad = f"{_shortened(REVISION, turn.bad.tags)} ({turn.bad.id[:8]})"
    if turn.good is None:
        return [f"first bad: {bad}: no comparison of this series passed before it."]
    good = f"{_shortened(REVISION, turn.good.tags)} ({turn.good.id[:8]})"
    told = [f"first bad: {bad}, after {good} passed"]
    told += [f"  {name}: {was} -> {is_}" for name, (was, is_) in turn.changed.items()]
    if not turn.changed:
        told.append("  of what is recorded nothing changed between the two: judge both again.")
    return told


def markdown(series: Sequence[StoredRun], name: str) -> str:
    """Return a series, oldest first, as a Markdown section: a table, and what it tells."""
    rows = rows_of(series)
    columns = list(rows[0]) if rows else []
    lines = [f"## Series {name}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(_cell(each) for each in row.values())} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {line.strip()}" for line in sentences(series)), ""])


def _passing(series: Sequence[StoredRun]) -> str:
    good = 0
    while good < len(series) and series[-1 - good].tags.get("verdict") == Outcome.PASS.value:
        good += 1
    after = "" if good == len(series) else f", after {series[-1 - good].id[:8]} did not"
    count = f"the last {good} of {len(series)} pass" if good > 1 else "the newest one passes"
    return f"series: {count}{after}."


def _is_version(tag: str) -> bool:
    return tag.startswith(_VERSION)


def _shortened(tag: str, tags: Mapping[str, str]) -> str:
    """Return a tag's value; of a commit or an id as many letters as name it."""
    value = tags.get(tag, _UNKNOWN)
    return value if _is_version(tag) else " ".join(_short(word) for word in value.split())


def _short(word: str) -> str:
    commit, plus, rest = word.partition("+")
    is_hash = len(commit) > _SHORT and all(letter in "0123456789abcdef" for letter in commit)
    return (commit[:_SHORT] if is_hash else commit) + plus + rest


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
