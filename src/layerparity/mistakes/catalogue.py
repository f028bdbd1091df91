"""Catalogue: the known bugs by name, how each is planted and how it is recognised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from layerparity.ground import registry
from layerparity.ground.errors import UserError, nearest
from layerparity.record.guilt import OF_TENSORS, SHOWN, WEIGHTS

if TYPE_CHECKING:
    from types import ModuleType

    from layerparity.mistakes.cause import Cause, Evidence, Rule
    from layerparity.mistakes.fault import Fault

# The name under which a port makes one module wrong.
WRONG_OUTPUT = "wrong_output"
KNOWN = "mistakes.known"
# What says that something is wrong, and not by which mistake, comes after what does.
_GENERAL = (*OF_TENSORS, "offset", "one_factor_each", "rotary", "scale")
# What says where in a tensor, and not why, comes between.
_WHERE = ("one_channel", "one_head")


def catalogue() -> list[str]:
    """Return the ids of the known faults, sorted; none is imported."""
    return list(registry.holding(KNOWN, "FAULT"))


def of_state() -> list[str]:
    """Return the ids of the known mistakes of what is kept between passes, sorted.

    One pass by itself shows none of them.
    """
    return list(registry.holding(KNOWN, "STATE"))


def mistakes_of_state() -> Iterator[Fault]:
    """Yield every known mistake of state, in each of its sizes."""
    for name in of_state():
        file = registry.load(KNOWN, name)
        yield from getattr(file, "STATES", (file.STATE,))


def known_fault(name: str) -> Fault:
    """Return a known fault, or one that a known bug's file tries beside it whatever the block.

    Raises UserError with the nearest id where there is none.
    """
    check_fault(name)
    if name in catalogue():
        fault: Fault = registry.load(KNOWN, name).FAULT
        return fault
    if name in of_state():
        kept: Fault = registry.load(KNOWN, name).STATE
        return kept
    from torch import nn

    files = _naming(name)
    tried: dict[str, Fault] = {each.id: each for file in files for each in file.TRIES(nn.Module())}
    if name not in tried:
        raise _unknown(name)
    return tried[name]


def check_fault(name: str) -> None:
    """Raise UserError with the nearest id where a name is neither a fault's nor `WRONG_OUTPUT`."""
    if name not in (*catalogue(), *of_state(), WRONG_OUTPUT) and not _naming(name):
        raise _unknown(name)


def _naming(name: str) -> list[ModuleType]:
    """Return the known bugs' files that have a text of this name and try mistakes; imported."""
    files = registry.holding(KNOWN, "TRIES")
    found = [each for each in files if f'"{name}"' in registry.source(KNOWN, each)]
    return [registry.load(KNOWN, each) for each in found]


def _unknown(name: str) -> UserError:
    known = sorted((*catalogue(), *of_state(), WRONG_OUTPUT))
    text = f"There is no fault '{name}'.{nearest(name, known)} Known: {', '.join(known)}."
    return UserError(text)


def rules() -> dict[str, Rule]:
    """Return the rules that recognise a known bug, by the name of its file."""
    names = registry.holding(KNOWN, "RULE")
    return {name: registry.load(KNOWN, name).RULE for name in names}


def suspected(evidence: Evidence) -> list[Cause]:
    """Return every cause that a rule sees in the evidence, likely or not, the surest first.

    How sure it is was measured: how often such a cause was true of faulty runs. What a mistake
    that was planted showed is one of them, and what it refuted none.
    """
    from layerparity.mistakes.measured import LIMIT, cases_of, share_of

    judged = [rule.judge(evidence) for rule in rules().values()]
    judged = [*evidence.replayed.causes, *(c for c in judged if not _refuted(c, evidence))]
    causes = [
        replace(
            each,
            confidence=share_of(each),
            cases=cases_of(each),
            reasons=tuple(each.reasons),
            findings=tuple(each.findings),
        )
        for each in judged
        if each is not None
    ]

    refined = {cause for fault in evidence.replayed.shown for cause in fault.refines}

    def order(cause: Cause) -> tuple[bool, bool, bool, bool, float, str]:
        rare, general = cause.confidence < LIMIT, cause.id in _GENERAL
        less = cause.id in refined
        return rare, less, general, cause.id in _WHERE, -cause.confidence, cause.id

    return sorted(causes, key=order)


def _refuted(cause: Cause | None, evidence: Evidence) -> bool:
    """Say whether replays leave nothing of a cause that no numbers show."""
    if cause is None or cause.grade == SHOWN:
        return False
    if cause.grade == WEIGHTS:
        # How weights were unpacked says more than that they are others.
        return any(fault.quantised for fault in evidence.replayed.shown)
    return bool(evidence.replayed.shown) or cause.id in evidence.replayed.refuted


def likeliest(evidence: Evidence) -> list[Cause]:
    """Return the causes in the evidence that are true more often than not, the surest first."""
    from layerparity.mistakes.measured import LIMIT

    return [each for each in suspected(evidence) if each.confidence >= LIMIT]
