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
# Letters of a name that cannot be.
_SHOWN = 120


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


class PortError(UserError):
    """A port's own code broke while it computed: that is no refusal, and says nothing is right."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return f" Did you mean '{close[0]}'?" if close else ""


# What the system does not look at, whichever of our calls asked it to.
_NO_PATHS = {
    errno.ENAMETOOLONG: "a path that is too long",
    errno.ELOOP: "a link that leads to itself",
}


def refused_name(error: Exception) -> UserError | None:
    """Return what is said of an error that a path or a text, from anywhere, can be none; or None.

    Such an error may be raised wherever a path is looked at, or a text is written.
    """
    name, why = "", ""
    if isinstance(error, OSError):
        name, why = str(error.filename), _NO_PATHS.get(error.errno or 0, "")
    elif isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from"):
        # `Path.resolve` has no type of error for it.
        name, why = str(error).split("'")[-2], _NO_PATHS[errno.ELOOP]
    elif isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        start = max(0, error.start - _SHOWN // 2)
        name, why = error.object[start : start + _SHOWN], "a name that is no UTF-8"
    shown = f"{name[:_SHOWN]}..." if len(name) > _SHOWN else name
    return UserError(f"{shown} is {why}", "give another.") if why else None


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
