"""Parse JSON and YAML that somebody else wrote: whatever cannot be used is a ValueError.

The parsers themselves raise much else: RecursionError for what is nested, and AttributeError or
IndexError for some tags of YAML. What they do return may still be no good to anybody: a text that
no file can hold, or a value so nested that whoever walks it fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

# The deepest file of ours has a dozen.
MOST_LEVELS = 64


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError where it cannot be used."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels") from error
    return _usable(value)


def parse_yaml(text: str) -> Any:
    """Return the plain value of a YAML text. Raises ValueError where it cannot be used."""
    import yaml

    # The parser in C, which most builds of PyYAML have, is ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_endless(yaml.parse(text, loader))
        value = yaml.load(text, loader)  # noqa: S506 - both are loaders of plain values alone.
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # What stands there is not repeated: it may be another file altogether.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(f"it is no YAML{where}") from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels") from error
    return _usable(value)


def _refuse_endless(events: Iterable[Any]) -> None:
    """Raise ValueError, at the first event, for YAML whose reading or use would never end."""
    import yaml

    level = 0
    for event in events:
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        # Each level makes each further word slower to read.
        if level > MOST_LEVELS:
            raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
        # Ten lines of references to references unfold to more than any memory holds.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it repeats a part by reference: write it out")


def _usable(value: Any) -> Any:
    """Return a parsed value. Raises ValueError for too many levels, and for text that is none."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner: list[Any] = []
        for each in level:
            # Neither parser returns a subclass of these, and a manifest has millions of values.
            kind = type(each)
            if kind is str:
                if not each.isascii():
                    # Half of a character, which an escape may write and no file can: ValueError.
                    each.encode()
            elif kind is dict:
                inner += each
                inner += each.values()
            elif kind in (list, tuple, set):
                inner += each
        if not inner:
            return value
        level = inner
    raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
