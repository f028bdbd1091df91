"""One key of a command: a dataclass field with its default and what it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

_HELP = "help"
Default = TypeVar("Default")


@dataclass(frozen=True)
class Key:
    """A key as a command writes it, dots included, with its default and what it does."""

    path: str
    default: Any
    help: str


def key(default: Default, help_text: str) -> Default:
    """Return the dataclass field of a key: its default, and what it does, for --help and readers.

    A list may be a default: each instance gets its own.
    """
    metadata = {_HELP: help_text}
    field: Any = (
        dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
        if isinstance(default, list)
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
        yield Key(f"{prefix}{item.name}", value, item.metadata.get(_HELP, ""))
