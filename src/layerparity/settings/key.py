"""One key of a command: a dataclass field with its default and what it does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from layerparity.ground.errors import UserError

_HELP, _JOBS = "help", "jobs"
_BOUNDS = ("above", "least", "most")
# No count and no index of ours is larger; beyond it, sizes no longer fit what computes with them.
_MOST_WHOLE = 2**31 - 1
Default = TypeVar("Default")


@dataclass(frozen=True)
class Key:
    """A key as a command writes it, dots included, with its default and what it does.

    ``jobs`` read it, of those that read more than their ``READS``; None: it says how a run is made.
    """

    path: str
    default: Any
    help: str
    jobs: tuple[str, ...] | None = None


def key(
    default: Default, help_text: str, *, jobs: tuple[str, ...] | None = None, **bounds: float
) -> Default:
    """Return the dataclass field of a key: its default, and what it does, for --help and readers.

    ``jobs`` are those whose own --help shows it, beside those that have it in their module's
    ``READS``; None: it is a run's.
    ``bounds`` are those of a number: ``above``, or ``least`` and ``most``, which it may be itself.
    A list or a dict may be a default: each instance gets its own.
    """
    assert set(bounds) <= {*_BOUNDS}, f"no such bounds: {bounds}"
    metadata = {_HELP: help_text, _JOBS: jobs, **bounds}
    field: Any = (
        dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
        if isinstance(default, list | dict)
        else dataclasses.field(default=default, metadata=metadata)
    )
    # As `dataclasses.field` itself: declared as the default's type, so that this is checked.
    declared: Default = field
    return declared


def keys_of(schema: Any, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass, in order, those of dataclasses inside it in their place."""
    for item in dataclasses.fields(schema):
        factory = item.default_factory
        if factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory):
            yield from keys_of(factory, f"{prefix}{item.name}.")
            continue
        value = factory() if factory is not dataclasses.MISSING else item.default
        words, jobs = item.metadata.get(_HELP, ""), item.metadata.get(_JOBS)
        yield Key(f"{prefix}{item.name}", value, words, jobs)


def check_numbers(settings: Any, prefix: str = "") -> None:
    """Hold every number of a dataclass, and of those inside it, against the bounds of its key.

    Raises UserError for one out of bounds, infinite or NaN.
    """
    for item in dataclasses.fields(settings):
        path, value = f"{prefix}{item.name}", getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            check_numbers(value, f"{path}.")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                _check(path, number, item.metadata)


def _check(path: str, value: float, bounds: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}={value}", "give a finite number.")
    above, least, most = (bounds.get(name) for name in _BOUNDS)
    if above is not None and value <= above:
        raise UserError(f"{path}={value}", f"give a number above {above}.")
    if least is not None and value < least:
        raise UserError(f"{path}={_brief(value)}", f"give {least} or more.")
    if most is None and isinstance(value, int):
        most = _MOST_WHOLE
    if most is not None and value > most:
        raise UserError(f"{path}={_brief(value)}", f"give {most} or less.")


def _brief(value: float) -> str:
    """Return a number as it was typed; of one with hundreds of digits, the first and the last."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:20]}...{text[-4:]}"
