"""Decode: turn parsed JSON into values of the types that a dataclass declares, or say what misfits.

Known are str, int, float, bool, None, enums, dataclasses, ``X | None``, list, tuple, Sequence, dict
and Any. A key of a dictionary may be a whole number, which JSON writes as text; a dataclass that
has a ``parse`` may be written as text, too, and `encode` writes it so.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints

Reader = Callable[[Any], Any]
_PLAIN = (str, int, float, bool, type(None))
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class MisfitError(ValueError):
    """What does not fit its type, and where: ``records[3].shape[0] is not a whole number``."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{place.removeprefix('.')} {what}".strip())
        self.what, self.place = what, place

    def under(self, outer: str) -> MisfitError:
        """Return the same misfit, seen from one level further out."""
        return MisfitError(self.what, f"{outer}{self.place}")


def decode(kind: Any, raw: object) -> Any:
    """Return a parsed JSON value as ``kind``, a type such as ``dict[str, Feed]``.

    Nothing is converted, apart from a whole number where a float is wanted. Raises ValueError that
    names the place of what is missing, unknown, or of another type.
    """
    return _reader(kind)(raw)


@cache
def _reader(kind: Any) -> Reader:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        read = _reader(inner[0])
        return lambda raw: None if raw is None else read(raw)
    if origin is dict:
        return _dictionary(*inner)
    if origin is not None:
        return _sequence(inner, list if origin is list else tuple)
    if is_dataclass(kind):
        return _dataclass(kind)
    if kind is Any:
        return lambda raw: raw
    return _enum(kind) if issubclass(kind, Enum) else _plain(kind)


def _plain(kind: type) -> Reader:
    # A bool is an int to Python, and no number to us.
    refused = () if kind is bool else bool
    taken = (int, float) if kind is float else kind
    words = _WORDS[kind]

    def read(raw: Any) -> Any:
        if not isinstance(raw, taken) or isinstance(raw, refused):
            raise MisfitError(f"is not {words}")
        value: Any = raw
        try:
            return float(value) if kind is float else value
        except OverflowError as error:
            raise MisfitError("is larger than any number") from error

    return read


def _enum(kind: type[Enum]) -> Reader:
    known = ", ".join(str(each.value) for each in kind)

    def read(raw: Any) -> Any:
        try:
            return kind(raw)
        except ValueError as error:
            raise MisfitError(f"is none of {known}") from error

    return read


def _sequence(kinds: tuple[Any, ...], make: Callable[[list[Any]], Any]) -> Reader:
    """Return what reads ``list[X]`` and ``tuple[X, ...]``, or ``tuple[X, X]`` of that length."""
    read = _reader(kinds[0])
    length = len(kinds) if make is tuple and kinds[1:] not in ((), (...,)) else None

    def read_all(raw: Any) -> Any:
        if not isinstance(raw, list):
            raise MisfitError("is not a list")
        if length not in (None, len(raw)):
            raise MisfitError(f"is not a list of {length}")
        values: list[Any] = []
        try:
            for each in raw:
                values.append(read(each))
        except MisfitError as error:
            raise error.under(f"[{len(values)}]") from error
        return make(values)

    return read_all


def _dictionary(key_kind: Any, kind: Any) -> Reader:
    read = _reader(kind)

    def read_all(raw: Any) -> dict[Any, Any]:
        if not isinstance(raw, dict):
            raise MisfitError("is not an object")
        values = {}
        for key, each in raw.items():
            try:
                if not isinstance(key, str) or (key_kind is int and not key.isdecimal()):
                    raise MisfitError(f"is not under {_WORDS[key_kind]}")
                values[key_kind(key)] = read(each)
            except MisfitError as error:
                raise error.under(f".{key}") from error
        return values

    return read_all


def _dataclass(kind: Any) -> Reader:
    needed = [
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    ]
    # A dataclass may hold itself: its fields are looked at when the first value is read.
    readers: dict[str, Reader] = {}

    def read(raw: Any) -> Any:
        if isinstance(raw, str) and hasattr(kind, "parse"):
            return _parsed(kind, raw)
        if not isinstance(raw, dict):
            raise MisfitError("is not an object")
        if not readers:
            hints = get_type_hints(kind)
            readers.update({each.name: _reader(hints[each.name]) for each in fields(kind)})
        for name in needed:
            if name not in raw:
                raise MisfitError("is missing", f".{name}")
        values = {}
        for name, each in raw.items():
            try:
                if name not in readers:
                    raise MisfitError("is not known")
                values[name] = readers[name](each)
            except MisfitError as error:
                raise error.under(f".{name}") from error
        return kind(**values)

    return read


def _parsed(kind: Any, text: str) -> Any:
    try:
        return kind.parse(text)
    except ValueError as error:
        raise MisfitError(f"is damaged: {error}") from error


def encode(value: Any) -> Any:
    """Return a value as plain ones that JSON can write and `decode` reads back.

    A dataclass becomes a dictionary of its fields, or text where it has a ``parse``.
    """
    if type(value) in _PLAIN:
        # Nearly all of what is written, and at once.
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    if is_dataclass(value) and not hasattr(value, "parse"):
        return {each.name: encode(getattr(value, each.name)) for each in fields(value)}
    return str(value) if is_dataclass(value) else value


def json_lines(raw: Mapping[str, Any]) -> str:
    """Return plain values as JSON text, a line for each member of what is listed in them.

    What is not plain, as another's backend may say it, becomes text: no long run ends by it. json's
    own indentation is made in Python, and took seconds where there are many.
    """
    dumped = partial(json.dumps, default=str)
    lines = []
    for name, value in raw.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(dumped, value)) + "\n ]"
        elif isinstance(value, dict) and value:
            parts = (dumped({key: each})[1:-1] for key, each in value.items())
            text = "{\n  " + ",\n  ".join(parts) + "\n }"
        else:
            text = dumped(value)
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"
