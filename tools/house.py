"""Measure the plan of the code, and hold it against the limits of the house.

    python tools/house.py              # each figure, its limit, and whether it is kept
    python tools/house.py --check      # also end with 1 if one is not
    python tools/house.py --why twins  # the places behind a figure

A room is a package or module right below layerparity. Imports within functions and for types count
like all others.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import signal
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from source import EDGES, File, Package, circles, is_private, read, room

ROOT = Path(__file__).resolve().parents[1] / "src" / "layerparity"
# Lines: a file below the first wants more than one user; no file is above the second.
SHORT, LONG = 50, 400
SUPPRESSED = 1038
_SUPPRESSIONS = re.compile(r"# (?:type: ignore|noqa)|(?<![\w.])Any(?!\w)")
# By figure: its value is at least, or at most, that.
LIMITS = {
    "lines": (">=", 100),
    "long": ("<=", 0),
    "largest": ("<=", 12),
    "arrows": ("<=", 6),
    "circles": ("<=", 0),
    "knots": ("<=", 0),
    "private": ("<=", 0),
    "twins": ("<=", 0),
    # What there is today: it may only fall.
    "suppressed": ("<=", SUPPRESSED),
}
# Class names that several modules may have, each with the reason.
TWINS_ALLOWED = {"Settings": "a plug-in's keys: whoever loads a plug-in looks for this name"}


@dataclass(frozen=True)
class Figure:
    """One figure: what its limit is held against, how it is printed, the places behind it."""

    name: str
    what: str
    value: float
    shown: str
    places: list[str]

    @property
    def limit(self) -> str:
        """The limit as it is printed; empty where there is none."""
        return "{} {}".format(*LIMITS[self.name]) if self.name in LIMITS else ""

    @property
    def is_kept(self) -> bool:
        """Whether the value keeps its limit, or has none."""
        sign, bound = LIMITS.get(self.name, ("<=", math.inf))
        return self.value >= bound if sign == ">=" else self.value <= bound


def measure(package: Package) -> list[Figure]:
    """Return all figures of a package, in the order they are printed."""
    files = list(package.files.values())
    sizes = [(file.lines, file.path) for file in files]
    functions = [
        (_end(each) - each.lineno + 1, f"{file.path}:{each.lineno} {each.name}")
        for file in files
        for each in _functions(file)
    ]
    return [
        _listed("files", "files", [f"{lines:5} {path}" for lines, path in sizes]),
        _spread("lines", "lines per file: median, p95, max", sizes),
        _spread("functions", "lines per function: median, p95, max", functions),
        used_once(package),
        *rooms(package),
        arrows(package),
        file_circles(package),
        knots(package),
        private_imports(package),
        twins(package),
        confetti(package),
        _listed("long", f"files over {LONG} lines", [p for lines, p in sizes if lines > LONG]),
        suppressed(package),
    ]


def broken(figures: Collection[Figure]) -> list[str]:
    """Return the names of the figures that break their limits."""
    return [figure.name for figure in figures if not figure.is_kept]


def used_once(package: Package) -> Figure:
    """Return the share, in per cent of all functions, of private ones with exactly one use.

    Uses are counted outside the function, in its own file and in files that import that file and
    have no function of that name themselves.
    """
    used = {module: _used(file) for module, file in package.files.items()}
    own = {module: _functions(file) for module, file in package.files.items()}
    names = {module: {each.name for each in functions} for module, functions in own.items()}
    private, places, users = 0, [], package.users
    for module, functions in own.items():
        for each in functions:
            span = range(each.lineno, _end(each) + 1)
            uses = sum(line not in span for line in used[module][each.name])
            others = [user for user in users[module] if each.name not in names[user]]
            uses += sum(len(used[user][each.name]) for user in others)
            private += is_private(each.name)
            if is_private(each.name) and uses == 1:
                places.append(f"{package.files[module].path}:{each.lineno} {each.name}")
    share = 100 * len(places) / max(sum(map(len, own.values())), 1)
    shown = f"{share:.0f} % ({len(places)}, of {private} private)"
    return Figure("once", "private functions used once, of all functions", share, shown, places)


def rooms(package: Package) -> list[Figure]:
    """Return how many rooms there are, and the largest one's share of all lines in per cent."""
    lines: Counter[str] = Counter()
    for module, file in package.files.items():
        lines[room(module)] += file.lines
    ordered = [(name, count) for name, count in lines.most_common() if name not in EDGES]
    places = [f"{count:5} {name}" for name, count in ordered]
    name, count = ordered[0]
    share = 100 * count / lines.total()
    shown = f"{share:.1f} % ({name})"
    return [
        _listed("rooms", "rooms", places),
        Figure("largest", "the largest room, of all lines", share, shown, places),
    ]


def arrows(package: Package) -> Figure:
    """Return how many ordered pairs of rooms a room has of which the first imports the second."""
    pairs = Counter((room(file.module), room(each.module)) for file, each in package.across())
    places = [f"{count:5} {here} -> {there}" for (here, there), count in pairs.most_common()]
    number = len({room(module) for module in package.files} - set(EDGES))
    each = len(places) / max(number, 1)
    shown = f"{each:.2f} ({len(places)})"
    return Figure("arrows", "arrows between rooms, of each room", each, shown, places)


def file_circles(package: Package) -> Figure:
    """Return how many groups of files there are that import each other, with the imports."""
    found = circles(package.links)
    places = []
    for circle in found:
        places.append(f"{len(circle)} files: {', '.join(circle)}")
        for module, other in product(circle, circle):
            inside = [x for x in package.imports[module] if other == x.module != module]
            path = package.files[module].path
            places += [f"    {path}:{x.line} imports {other} {x.when}".rstrip() for x in inside]
    return Figure("circles", "circles between files", len(found), str(len(found)), places)


def knots(package: Package) -> Figure:
    """Return how many groups of rooms import each other, on the first and on the second level.

    A text that is a module's path counts as an import of it.
    """
    links = {module: {*found, *_said(package, module)} for module, found in package.links.items()}
    places = []
    for level, of in (("rooms", room), ("rooms in rooms", inner_room)):
        graph: defaultdict[str, set[str]] = defaultdict(set)
        for module, found in links.items():
            graph[of(module)] |= {of(each) for each in found if room(each) not in EDGES}
        inside = {name: there - {name} for name, there in graph.items() if name not in EDGES}
        places += [f"{len(c)} {level}: {', '.join(c)}" for c in circles(inside)]
    return _listed("knots", "circles between rooms, and between theirs", places)


def _said(package: Package, module: str) -> Iterator[str]:
    """Yield the modules of a package that a module's texts name, alone or before a name."""
    for node in ast.walk(package.files[module].tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            path = node.value
            if path.startswith(f"{package.name}.") and all(map(str.isidentifier, path.split("."))):
                known = [path, path.rpartition(".")[0]]
                yield from [each for each in known if each in package.files and each != module][:1]


def inner_room(module: str) -> str:
    """Return a room's own room that a module is part of, or the room that it lies in."""
    parts = [*module.split("."), "__init__"]
    return "/".join(parts[1:3]) if len(parts) > 4 else parts[1]


def suppressed(package: Package) -> Figure:
    """Return how often a checker is told to look away: ``type: ignore``, ``noqa``, ``Any``."""
    places = []
    for file in package.files.values():
        for number, line in enumerate(file.text.splitlines(), start=1):
            found = _SUPPRESSIONS.findall(line)
            if found and not line.lstrip().startswith("from typing import"):
                places += [f"{file.path}:{number} {line.strip()}"] * len(found)
    return _listed("suppressed", "type: ignore, noqa, Any", places)


def private_imports(package: Package) -> Figure:
    """Return how many imports from another room name a private module, or a private name in one."""
    places = []
    for file, each in package.across():
        if any(map(is_private, [*each.module.split("."), *each.names])):
            names = f": {', '.join(each.names)}" if each.names else ""
            places.append(f"{file.path}:{each.line} imports {each.module}{names}")
    return _listed("private", "private imports across rooms", places)


def twins(package: Package) -> Figure:
    """Return how many class names stand in more than one module, in a class or function or not."""
    found = defaultdict(set)
    for module, file in package.files.items():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef) and node.name not in TWINS_ALLOWED:
                found[node.name].add(module)
    places = [
        f"{name}: {', '.join(sorted(modules))}"
        for name, modules in sorted(found.items())
        if len(modules) > 1
    ]
    return _listed("twins", "class names in several modules", places)


def confetti(package: Package) -> Figure:
    """Return how many short files are imported by one file only."""
    places = []
    for module, users in package.users.items():
        file = package.files[module]
        if file.lines < SHORT and len(users) == 1 and not file.is_init:
            places.append(f"{file.lines:5} {file.path}, used by {min(users)}")
    return _listed("confetti", f"files under {SHORT} lines with one user", places)


def table(figures: Collection[Figure]) -> str:
    """Return the figures as lines of text, in columns."""
    rows = [("figure", "", "today", "limit", "")]
    for each in figures:
        mark = "" if not each.limit else "kept" if each.is_kept else "BROKEN"
        rows.append((each.name, each.what, each.shown, each.limit, mark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [map(str.ljust, row, widths) for row in rows]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _listed(name: str, what: str, places: list[str]) -> Figure:
    return Figure(name, what, len(places), str(len(places)), places)


def _spread(name: str, what: str, sizes: list[tuple[int, str]]) -> Figure:
    """Return the median, the 95th percentile by nearest rank, and the largest."""
    ordered = sorted(sizes)
    counts = [lines for lines, _ in ordered] or [0]
    median = statistics.median(counts)
    shown = f"{median:g} {counts[math.ceil(0.95 * len(counts)) - 1]} {counts[-1]}"
    places = [f"{lines:5} {place}" for lines, place in reversed(ordered)]
    return Figure(name, what, median, shown, places)


def _functions(file: File) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(file.tree) if isinstance(node, functions)]


def _end(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.end_lineno or function.lineno


def _used(file: File) -> defaultdict[str, list[int]]:
    """Return the lines on which each name is used, alone or behind a dot."""
    used = defaultdict(list)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name):
            used[node.id].append(node.lineno)
        elif isinstance(node, ast.Attribute):
            used[node.attr].append(node.lineno)
    return used


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or the places behind a figure; with ``--check``, say by the status."""
    figures = {figure.name: figure for figure in measure(read(ROOT))}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is broken")
    parser.add_argument("--why", choices=figures, metavar="FIGURE", help=", ".join(figures))
    options = parser.parse_args(arguments)
    if options.why:
        print("\n".join(figures[options.why].places) or "nothing")
    else:
        print(table(figures.values()))
    return int(options.check and bool(broken(figures.values())))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --why ends quietly where head has enough
    sys.exit(main())
