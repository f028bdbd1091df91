"""The house keeps its floors: imports go down, siblings never meet, heavy imports stay home."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from conftest import ROOT
from floors import climbs, floors
from source import EDGES, File, Package, read, room

FLOORS = floors(ROOT / "docs/developers/architecture.md")
# The only folders that may import these libraries.
ROOMS = {
    "mlflow": ("tracking",),
    "torch_xla": ("backends/neuron", "machine"),
    "torch_neuronx": ("backends/neuron", "machine"),
    "neuronx_distributed": ("backends/neuron", "ports/nxdi", "machine"),
}


@cache
def code() -> Package:
    """Return the product's package, which takes seconds to read."""
    return read(ROOT / "src" / "layerparity")


def foreign(file: File) -> Iterator[tuple[str, int]]:
    """Yield what a file imports by its full name, and on which line."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno


def planted(where: str, text: str) -> list[str]:
    """Return what climbs in a new file of a room, were it there."""
    file = File(f"layerparity.{where}.planted", "planted.py", text)
    found = climbs(Package.of([*code().files.values(), file]), FLOORS)
    return [line for line in found if line.startswith("planted.py")]


def table(folder: Path, *rows: str) -> Path:
    """Write a page with a table of floors."""
    page = folder / "page.md"
    lines = ("# Page", "", "## Floors", "", "Words.", "", "| floor | package |", "|---|---|", *rows)
    page.write_text("\n".join((*lines, "", "## Other", "", "| 9 | elsewhere |")))
    return page


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in code().files} - set(EDGES) == set(FLOORS)


def test_imports_go_down_only() -> None:
    assert climbs(code(), FLOORS) == []


def test_an_upward_import_is_seen() -> None:
    ground, roof = min(FLOORS, key=FLOORS.__getitem__), max(FLOORS, key=FLOORS.__getitem__)
    assert planted(roof, f"from layerparity import {ground}, __version__") == []
    assert planted(ground, f"def f():\n    from layerparity import {roof}\n    {roof}.main()") == [
        f"planted.py:2 imports layerparity.{roof}, which is not below it"
    ]
    assert len(planted(roof, "import layerparity.__main__")) == 1
    here, there = next((a, b) for a, b in combinations(FLOORS, 2) if FLOORS[a] == FLOORS[b])
    assert len(planted(here, f"from layerparity import {here}, {there}")) == 1
    assert planted("cellar", "import layerparity") == ["planted.py:1: cellar has no floor"]


def test_the_table_is_read_whole_or_refused(tmp_path: Path) -> None:
    page = table(
        tmp_path, "| 2 | `a/`, b | both |", "| | c | a row of the same floor |", "| 0 | d |"
    )
    assert floors(page) == {"a": 2, "b": 2, "c": 2, "d": 0}
    with pytest.raises(ValueError, match="a stands on two floors"):
        floors(table(tmp_path, "| 1 | a |", "| 0 | a |"))
    with pytest.raises(ValueError, match="no table"):
        floors(table(tmp_path))
    page.write_text("# Page\n\n| 1 | a |\n| 0 | b |\n| 0 | c |\n")
    with pytest.raises(ValueError, match="no table"):
        floors(page)


def test_each_library_stays_in_its_room() -> None:
    wrong = []
    for file in code().files.values():
        inside = file.path.partition("/")[2]
        for name, line in foreign(file):
            rooms = ROOMS.get(name.split(".")[0])
            if rooms is not None and not inside.startswith(rooms):
                wrong.append(f"{inside}:{line} imports {name}")
    assert wrong == []


def test_no_pickle_and_no_foreign_code() -> None:
    """But a dump's, by torch's reader of weights alone, which knows tensors and containers."""
    alone = r"torch\.load\((?![^)]*weights_only=True)"
    forbidden = (alone, r"pickle\.load", "trust_remote_code=True", "allow_pickle=True")
    wrong = [
        f"{file.path}: {word}"
        for file in code().files.values()
        for word in forbidden
        if re.search(word, file.text)
    ]
    assert wrong == []
