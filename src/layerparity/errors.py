"""The ways a command can end, and the exception that carries each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit status of every command."""

    OK = 0
    FAILED = 1
    USER = 2
    INTERNAL = 3
    INCONCLUSIVE = 4


class UserError(Exception):
    """A mistake the user can mend: a short message that says the cure, exit status 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
