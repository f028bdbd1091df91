"""Floors: imports go strictly down, by the table in docs/developers/architecture.md."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from source import EDGES, Package, room


def floors(page: Path) -> dict[str, int]:
    """Read the table under ``## Floors``: the floor of each package.

    A row's first cell is the floor, or empty for the floor of the row above; its second names
    packages, separated by commas. Raises ValueError for a page without such a table, and for a
    package that stands in it twice.
    """
    found: dict[str, int] = {}
    floor: int | None = None
    for number, packages in _rows(page):
        floor = int(number) if number else floor
        for name in (each.strip(" `/") for each in packages.split(",")):
            if name in found or floor is None:
                raise ValueError(f"{page.name}: {name} stands on two floors, or on none")
            found[name] = floor
    return found


def _rows(page: Path) -> list[list[str]]:
    """Return the first two cells of each row, without the header."""
    _, heading, below = page.read_text(encoding="utf-8").partition("\n## Floors\n")
    table = "\n|" + below.partition("\n## ")[0].partition("\n|")[2]
    lines = list(takewhile(lambda line: line.startswith("|"), table[1:].splitlines()))
    if not heading or len(lines) < 3:
        raise ValueError(f"{page.name} has no table under '## Floors'")
    return [[cell.strip() for cell in line.split("|")[1:3]] for line in lines[2:]]


def climbs(package: Package, floor_of: dict[str, int]) -> list[str]:
    """Return the imports that do not go strictly down, each with its file and line.

    Within a package anything goes. The top ``__init__`` is below all, ``__main__`` above.
    """
    floor: dict[str, float] = dict(floor_of)
    floor |= dict(zip(EDGES, (float("-inf"), float("inf")), strict=True))
    wrong = []
    for module, found in package.imports.items():
        here, path = room(module), package.files[module].path
        for each in found:
            there = room(each.module)
            homeless = [name for name in (here, there) if name not in floor]
            if homeless:
                wrong.append(f"{path}:{each.line}: {homeless[0]} has no floor")
            elif here != there and floor[there] >= floor[here]:
                wrong.append(f"{path}:{each.line} imports {each.module}, which is not below it")
    return wrong
