"""How often what is printed is true: shares against truth, by bins and by rule, over a corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from judging.runs import CaseResult
from layerparity.selftest.outcomes import VISIBLE, Ending
from layerparity.selftest.table import Summary, Table

# Where shares are cut into bins; the first is wide, since little is printed there.
BINS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.001)
# What counts as sure enough to be acted on, and how often that has to be true.
SURE = 0.7
WANTED_TRUE = 0.95
# How often layer and component have to be named where the effect is twice the floor.
WANTED_NAMED = 0.98


def corpus_summary(results: Sequence[CaseResult]) -> Summary:
    """Return what a corpus comes to: a pass where sure causes are true and places are named."""
    sure = [each[3] for each in said(results) if each[2] >= SURE]
    visible = [each for each in judged(results) if each.effect >= VISIBLE]
    counts = {
        "faulty runs": len(judged(results)),
        f"causes said at {SURE:.0%}": len(sure),
        "of these true": sum(sure),
        "visible faults": len(visible),
        "of these named": sum(each.ending is Ending.NAMED for each in visible),
    }
    unforeseen = sum(not each.foreseen for each in judged(results))
    text = (
        f"{counts['of these true']} of {len(sure)} causes printed at {SURE:.0%} or more are true, "
        f"in {len(judged(results))} faulty runs, {unforeseen} of kinds that no rule was written "
        f"for.\n{counts['of these named']} of {len(visible)} faults of twice the noise floor were "
        "named with the right layer and component."
    )
    tables = [table(results) for table in (share_table, rule_table, place_table, wrong_table)]
    good = _enough(counts["of these true"], len(sure), WANTED_TRUE)
    good = good and _enough(counts["of these named"], len(visible), WANTED_NAMED)
    return Summary("pass" if good else "fail", counts, text, [each for each in tables if each[2]])


def _enough(good: int, number: int, wanted: float) -> bool:
    return good >= wanted * number


def judged(results: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the cases that were run and changed a bit."""
    return [each for each in results if each.ending not in (Ending.SAME, Ending.NOT_HERE)]


def said(results: Sequence[CaseResult]) -> list[tuple[CaseResult, str, float, bool]]:
    """Return every printed cause: its case, its rule, its share, and whether it is true."""
    return [
        (each, rule, share, rule in each.true)
        for each in judged(results)
        for rule, share in each.causes
    ]


def measured(results: Sequence[CaseResult]) -> dict[str, dict[str, list[int]]]:
    """Return how often each rule was suspected and true, [said, true] by rule and grade."""
    counts: dict[str, dict[str, list[int]]] = {}
    for each in judged(results):
        for rule, grade in each.suspected:
            own = counts.setdefault(rule, {}).setdefault(grade, [0, 0])
            own[0] += 1
            own[1] += rule in each.true
    return {rule: dict(sorted(grades.items())) for rule, grades in sorted(counts.items())}


def share_table(results: Sequence[CaseResult]) -> Table:
    """Return, for each bin of printed shares, how many were said and how many were true."""
    columns = ("share", "said", "true", "rate", "said first", "true of these", "unforeseen", "true")
    rows: list[tuple[str, ...]] = []
    for low, high in pairwise(BINS):
        own = [each for each in said(results) if low <= each[2] < high]
        if own:
            first = [each for each in own if each[0].causes[0] == (each[1], each[2])]
            strange = [each for each in own if not each[0].foreseen]
            label = f"{low:.0%} to {min(high, 1):.0%}"
            rows.append((label, *_rated(own), *_counted(first), *_counted(strange)))
    sure = [each for each in said(results) if each[2] >= SURE]
    rows.append((f"{SURE:.0%} and more", *_rated(sure), "", "", "", ""))
    return "Printed shares", columns, rows


def rule_table(results: Sequence[CaseResult]) -> Table:
    """Return, for each rule, how often it was said and true, also when it was sure."""
    columns = ("rule", "said", "true", f"said at {SURE:.0%}", "true of these", "could be said")
    everything = said(results)
    possible = [rule for each in judged(results) for rule in each.true]
    rows: list[tuple[str, ...]] = []
    for rule in sorted({each[1] for each in everything} | set(possible)):
        own = [each for each in everything if each[1] == rule]
        sure = [each for each in own if each[2] >= SURE]
        rows.append((rule, *_counted(own), *_counted(sure), str(possible.count(rule))))
    return "Rules", columns, rows


def place_table(results: Sequence[CaseResult]) -> Table:
    """Return how often the place was named, by the effect over the floor, type and foresight."""
    columns = ("cases", "number", "found", "layer", "layer and component")
    kinds: dict[str, Callable[[CaseResult], bool]] = {
        "effect below twice the floor": lambda each: each.effect < VISIBLE,
        "effect twice the floor and more": lambda each: each.effect >= VISIBLE,
        ", float32": lambda each: each.effect >= VISIBLE and each.dtype == "float32",
        ", bfloat16": lambda each: each.effect >= VISIBLE and each.dtype == "bfloat16",
        ", weights told": lambda each: each.effect >= VISIBLE and each.told,
        ", weights untold": lambda each: each.effect >= VISIBLE and not each.told,
        ", kinds foreseen": lambda each: each.effect >= VISIBLE and each.foreseen,
        ", kinds unforeseen": lambda each: each.effect >= VISIBLE and not each.foreseen,
    }
    rows: list[tuple[str, ...]] = []
    for words, kind in kinds.items():
        own = [each for each in judged(results) if kind(each)]
        if own:
            found = sum(each.ending is not Ending.MISSED for each in own)
            layer = sum(each.named.startswith(each.place[: len("layers.0")]) for each in own)
            named = sum(each.ending is Ending.NAMED for each in own)
            rates = [f"{count / len(own):.1%}" for count in (found, layer, named)]
            rows.append((words, str(len(own)), *rates))
    return "Places", columns, rows


def wrong_table(results: Sequence[CaseResult]) -> Table:
    """Return the sure causes that are not true, and the places not named in spite of the effect."""
    columns = ("case", "place", "named", "said")
    rows: list[tuple[str, ...]] = [
        (
            each.name,
            each.place,
            each.named,
            ", ".join(f"{rule} {share:.0%}" for rule, share in each.causes),
        )
        for each in judged(results)
        if (each.effect >= VISIBLE and each.ending is not Ending.NAMED)
        or any(share >= SURE and rule not in each.true for rule, share in each.causes)
    ]
    return "Not as it should be in the corpus", columns, rows


def _counted(own: Sequence[tuple[CaseResult, str, float, bool]]) -> tuple[str, str]:
    return str(len(own)), str(sum(each[3] for each in own))


def _rated(own: Sequence[tuple[CaseResult, str, float, bool]]) -> tuple[str, str, str]:
    rate = sum(each[3] for each in own) / len(own) if own else 0.0
    return (*_counted(own), f"{rate:.0%}")
