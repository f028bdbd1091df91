"""Decoding: a value is of the type that a dataclass declares, or the misfit's place is named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from layerparity.ground.decode import decode, encode, json_lines


class Colour(Enum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True)
class Record:
    name: str
    size: int
    share: float = 0.5
    shape: tuple[int, ...] = ()
    ends: tuple[int, int] = (0, 0)
    colour: Colour = Colour.red
    by_layer: dict[int, bool] = field(default_factory=dict)
    parts: list[Record] = field(default_factory=list)
    note: str | None = None


WHOLE = {
    "name": "a",
    "size": 3,
    "share": 1,
    "shape": [1, 2],
    "ends": [0, 9],
    "colour": "blue",
    "by_layer": {"7": True},
    "parts": [{"name": "b", "size": 0}],
    "note": None,
}


def test_what_was_written_is_read_back() -> None:
    read = decode(Record, WHOLE)
    assert read == Record(
        *("a", 3, 1.0, (1, 2), (0, 9), Colour.blue, {7: True}, [Record("b", 0)], None)
    )
    assert type(read.share) is float
    assert decode(Record, json.loads(json.dumps(encode(read)))) == read


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # What nobody knows is not dropped: it may be a limit that was mistyped.
        ({"sise": 3}, "sise is not known"),
        ({"parts": [{"name": "b", "size": 0, "sise": 1}]}, r"parts\[0\]\.sise is not known"),
        ({"parts": [{"name": "b"}]}, r"parts\[0\]\.size is missing"),
        # A bool is an int to Python.
        ({"size": True}, "size is not a whole number"),
        ({"size": 3.0}, "size is not a whole number"),
        ({"share": True}, "share is not a number"),
        ({"share": "1"}, "share is not a number"),
        ({"share": 10**400}, "share is larger than any number"),
        ({"by_layer": {"7": 1}}, r"by_layer\.7 is not true or false"),
        ({"by_layer": {"x": True}}, r"by_layer\.x is not under a whole number"),
        ({"shape": [1, None]}, r"shape\[1\] is not a whole number"),
        ({"ends": [1, 2, 3]}, "ends is not a list of 2"),
        ({"colour": "green"}, "colour is none of red, blue"),
        ({"name": None}, "name is not text"),
        ({"note": 3}, "note is not text"),
    ],
)
def test_a_misfit_is_named_by_its_place(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        decode(Record, {**WHOLE, **changes})


def test_lines_are_read_back_and_what_json_has_no_word_for_is_text() -> None:
    raw = {"none": [], "rows": [{"a": [1, "x"]}, {"b": None}], "facts": {"k": 1.5, "l": {}}, "n": 2}
    text = json_lines(raw)
    assert json.loads(text) == raw
    assert [line.strip() for line in text.splitlines()[3:5]] == ['{"a": [1, "x"]},', '{"b": null}']
    odd = {"at": Path("x"), "listed": [Path("y")], "facts": {"kernel": Path("z")}}
    assert json.loads(json_lines(odd)) == {"at": "x", "listed": ["y"], "facts": {"kernel": "z"}}
