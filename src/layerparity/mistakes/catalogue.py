"""Catalogue: the known bugs by name, how each is planted and how it is recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerparity.ground import registry
from layerparity.ground.errors import UserError, nearest

if TYPE_CHECKING:
    from layerparity.mistakes.cause import Rule
    from layerparity.mistakes.fault import Fault

# The name under which a port plants a mistake that is drawn, not known.
MUTATION = "mutation"
_KNOWN = "mistakes.known"


def catalogue() -> dict[str, Fault]:
    """Return the known faults by id, sorted."""
    modules = {name: registry.load(_KNOWN, name) for name in registry.names(_KNOWN)}
    return {name: each.FAULT for name, each in modules.items() if hasattr(each, "FAULT")}


def known_fault(name: str) -> Fault:
    """Return a known fault. Raises UserError with the nearest id where there is none."""
    check_fault(name)
    return catalogue()[name]


def check_fault(name: str) -> None:
    """Raise UserError with the nearest id where a name is neither a fault's nor `MUTATION`."""
    known = sorted((*catalogue(), MUTATION))
    if name not in known:
        raise UserError(
            f"There is no fault '{name}'.{nearest(name, known)} Known: {', '.join(known)}."
        )


def rules() -> dict[str, Rule]:
    """Return the rules that recognise a known bug, by the name of its file."""
    modules = {name: registry.load(_KNOWN, name) for name in registry.names(_KNOWN)}
    return {name: each.RULE for name, each in modules.items() if hasattr(each, "RULE")}
