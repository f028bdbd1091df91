"""Catalogue: the known bugs by name, how each is planted and how it is recognised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from layerparity.ground import registry
from layerparity.ground.errors import UserError, nearest

if TYPE_CHECKING:
    from layerparity.mistakes.cause import Cause, Evidence, Rule
    from layerparity.mistakes.fault import Fault

# The names under which a port plants a mistake that is drawn, or makes one module wrong.
MUTATION = "mutation"
WRONG_OUTPUT = "wrong_output"
_KNOWN = "mistakes.known"


def catalogue() -> list[str]:
    """Return the ids of the known faults, sorted; none is imported."""
    return registry.holding(_KNOWN, "FAULT")


def known_fault(name: str) -> Fault:
    """Return a known fault. Raises UserError with the nearest id where there is none."""
    check_fault(name)
    fault: Fault = registry.load(_KNOWN, name).FAULT
    return fault


def check_fault(name: str) -> None:
    """Raise UserError with the nearest id where a name is neither a fault's nor `MUTATION`."""
    known = sorted((*catalogue(), MUTATION, WRONG_OUTPUT))
    if name not in known:
        raise UserError(
            f"There is no fault '{name}'.{nearest(name, known)} Known: {', '.join(known)}."
        )


def rules() -> dict[str, Rule]:
    """Return the rules that recognise a known bug, by the name of its file."""
    names = registry.holding(_KNOWN, "RULE")
    return {name: registry.load(_KNOWN, name).RULE for name in names}


def likeliest(evidence: Evidence) -> list[Cause]:
    """Return every cause that a rule sees in the evidence, the surest first."""
    judged = (rule.judge(evidence) for rule in rules().values())
    causes = [
        replace(each, reasons=tuple(each.reasons), findings=tuple(each.findings))
        for each in judged
        if each is not None
    ]
    return sorted(causes, key=lambda cause: (-cause.confidence, cause.id))
