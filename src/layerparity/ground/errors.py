"""The ways a command can end, and the exception that carries each."""

from __future__ import annotations

import difflib
import errno
import traceback
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

# Two words closer than this, of 1 for the same, may be one word mistyped.
_NEAR = 0.65


class Exit(IntEnum):
    """Exit status of every command."""

    OK = 0
    FAILED = 1
    USER = 2
    INTERNAL = 3
    INCONCLUSIVE = 4
    NOT_READY = 5


class UserError(Exception):
    """A mistake the user can mend: a short message that says the cure, exit status 2.

    Given in two parts, the message reads ``FOUND: CURE``, and ``found`` and ``cure`` keep them for
    whoever shows them apart; both are empty where the message was given whole.
    """

    found: str = ""
    cure: str = ""

    def __init__(self, message: str, cure: str = "") -> None:
        super().__init__(f"{message}: {cure}" if cure else message)
        if cure:
            self.found, self.cure = message, cure


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return f" Did you mean '{close[0]}'?" if close else ""


def said(error: BaseException) -> str:
    """Return an exception as the end of a sentence, with the line of it that names the fault.

    Its place is the innermost line outside installed packages. A text that ends with a colon, as
    torch's of a ``state_dict`` that does not fit, goes on with its next line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename] or frames
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"raised {type(error).__name__}{': ' + text if text else ''}{where}"


def memory_ran_out(error: BaseException) -> bool:
    """Say whether an exception is that of a machine, or a limit, with no memory left."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Neither torch's allocator for the CPU nor a thread without a stack has a type of its own.
    words = ("can't allocate memory", "can't start new thread")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)
