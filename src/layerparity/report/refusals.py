"""Say in words why two sides cannot be compared at all, and which runs were passed over for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layerparity.ground.errors import UserError
from layerparity.judge.choose import NoPairError, PassedOver
from layerparity.record.reason import UnlikeError
from layerparity.record.stored_run import StoredRun
from layerparity.report.reasons import reason, start_text

_MENTIONED = 3


@contextmanager
def obstacles_in_words() -> Iterator[None]:
    """Raise a UserError that says it all where the code inside finds nothing to compare."""
    try:
        yield
    except NoPairError as error:
        raise UserError(passed_over_text(error.newest)) from error
    except UnlikeError as error:
        raise UserError(unlike_text(error)) from error


def unlike_text(error: UnlikeError) -> str:
    """Return what differs between two sides of which no site can be compared, with the cure."""
    texts = list(dict.fromkeys(start_text(each) for each in error.reasons))
    more = f"; and {len(texts) - _MENTIONED} more" if len(texts) > _MENTIONED else ""
    return (
        f"No site of '{error.golden}' and '{error.candidate}' can be compared, these differ: "
        f"{'; '.join(texts[:_MENTIONED])}{more}. Make both from the same weights and inputs."
    )


def passed_over_text(pair: PassedOver) -> str:
    """Return which candidate does not fit which golden, and why."""
    return f"{_name(pair.candidate)} does not fit {_name(pair.golden)}: {_obstacle_text(pair)}"


def _obstacle_text(pair: PassedOver) -> str:
    against = pair.obstacle
    if isinstance(against, UnlikeError):
        return unlike_text(against)
    return str(against) if isinstance(against, UserError) else f"{against.site}: {reason(against)}"


def _name(runs: Sequence[StoredRun]) -> str:
    first = f"{runs[0].name} ({runs[0].id[:8] or runs[0].folder})"
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"
