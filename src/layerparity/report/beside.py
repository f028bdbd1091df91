"""Say what another candidate of the same golden shows about where a candidate went wrong."""

from __future__ import annotations

from collections.abc import Iterator

from layerparity.judge.beside import CandidatePair
from layerparity.record.verdict import Outcome, Verdict

_HOW = {Outcome.PASS: "passes", Outcome.FAIL: "fails"}


def beside_lines(found: CandidatePair) -> Iterator[str]:
    """Yield how the other candidate ended, and which of the two is to be mended."""
    other = found.other
    yield (
        f"beside:    {other.candidate.name} {_ended(other)}; {found.equal} of the {found.shared} "
        "sites that both show are equal to the bit"
    )
    yield f"           {_lesson(found)}"


def _ended(verdict: Verdict) -> str:
    """Return how a candidate ended, and where it goes wrong first."""
    where = f" at {verdict.guilty}" if verdict.guilty is not None else ""
    return f"{_HOW.get(verdict.outcome, f'is {verdict.outcome.value}')}{where}"


def _lesson(found: CandidatePair) -> str:
    """Return what both verdicts say together."""
    ours, theirs = found.candidate.candidate.name, found.other.candidate.name
    keys = ", ".join(
        f"no {key}" if now is None else f"{key}={now}" for key, (_, now) in found.changed.items()
    )
    between = (
        f"What differs between them ({keys})" if keys else "No key differs between them, yet it"
    )
    ends = found.candidate.outcome, found.other.outcome
    if found.blamed:
        return f"{between} makes {ours} wrong: {theirs}, without it, computes what the golden does."
    if ends == (Outcome.PASS, Outcome.PASS):
        return f"{between} changes nothing that counts."
    if ends == (Outcome.PASS, Outcome.FAIL):
        return f"{between} hides what is wrong in {theirs}."
    if ends == (Outcome.FAIL, Outcome.FAIL):
        place = "first at the same place" if found.same_place else "first at different places"
        return f"Both are wrong, {place}: mend {theirs} before you look at what differs."
    return "One of them could not be judged, so they do not say what made the difference."
