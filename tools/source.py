"""The files of a package, and which of its modules each imports. Files are parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# No rooms: the package's own first lines, and its door.
EDGES = ("__init__", "__main__")


@dataclass(frozen=True)
class File:
    """One file: its dotted module, its path from the folder that holds the package, its text."""

    module: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return len(self.text.splitlines())

    @property
    def is_init(self) -> bool:
        """Whether the file is a package's ``__init__``."""
        return self.path.endswith("__init__.py")


@dataclass(frozen=True)
class Import:
    """What one statement imports from one module, and when: '', 'lazy' (in a function) or 'typing'.

    ``names`` are taken from the module; none where it is meant itself. The parents that Python
    runs on the way to a module are not counted.
    """

    line: int
    when: str
    module: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """A package's files, and each file's imports of the package's modules, both by module."""

    name: str
    files: dict[str, File]
    imports: dict[str, list[Import]]

    @classmethod
    def of(cls, files: Collection[File]) -> Package:
        """Read the imports of files that are one package's."""
        by_module = {file.module: file for file in files}
        found = {file.module: list(_imports(file, by_module)) for file in files}
        return cls(min(by_module, key=len).partition(".")[0], by_module, found)

    @property
    def links(self) -> dict[str, set[str]]:
        """The modules that each module imports, itself left out."""
        return {
            module: {each.module for each in found} - {module}
            for module, found in self.imports.items()
        }

    @property
    def users(self) -> dict[str, set[str]]:
        """The modules that import each module."""
        links = self.links
        return {module: {user for user in links if module in links[user]} for module in links}

    def across(self) -> Iterator[tuple[File, Import]]:
        """Yield the imports from one room to another, each with its file."""
        for module, found in self.imports.items():
            for each in found:
                ends = {room(module), room(each.module)}
                if len(ends) == 2 and not ends & set(EDGES):
                    yield self.files[module], each


def read(root: Path) -> Package:
    """Read the package in a folder of its name."""
    paths = sorted(root.rglob("*.py"))
    files = []
    for path in paths:
        inside = path.relative_to(root.parent)
        parts = inside.parent.parts if path.stem == "__init__" else inside.with_suffix("").parts
        files.append(File(".".join(parts), inside.as_posix(), path.read_text(encoding="utf-8")))
    return Package.of(files)


def room(module: str) -> str:
    """Return the package or module right below the top one that a module is or is part of."""
    return [*module.split("."), "__init__"][1]


def is_private(name: str) -> bool:
    """Say whether a name begins with one underscore; ``__init__`` and its like do not count."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the strongly connected components of at least two nodes, each sorted."""
    reached = {node: _reached(graph, node) for node in graph}
    found = {
        frozenset(there for there in reached[here] if here in reached.get(there, ()))
        for here in graph
    }
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def _reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    """Return what a node leads to, itself only if there is a way back."""
    reached: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        node = ahead.pop()
        if node not in reached:
            reached.add(node)
            ahead += graph.get(node, ())
    return reached


def _imports(file: File, modules: Collection[str]) -> Iterator[Import]:
    for statement, when in _statements(file.tree, ""):
        found: dict[str, list[str]] = {}
        for dotted in _named(file, statement):
            parts = dotted.split(".")
            heads = (".".join(parts[:cut]) for cut in range(len(parts), 0, -1))
            module = next((head for head in heads if head in modules), "")
            if module:
                found.setdefault(module, []).append(dotted[len(module) + 1 :])
        for module, names in found.items():
            yield Import(statement.lineno, when, module, tuple(filter(None, names)))


def _statements(node: ast.AST, when: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yield the import statements at and below a node, each with when it happens."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, when
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        when = when or "lazy"
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        when = "typing"
    for child in ast.iter_child_nodes(node):
        # No expression holds a statement, and most nodes are expressions.
        if not isinstance(child, ast.expr):
            yield from _statements(child, when)


def _named(file: File, statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Return what a statement names, dotted from the top."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module.split(".") if statement.module else []
    if statement.level:
        above = file.module.split(".")
        base = above[: len(above) + file.is_init - statement.level] + base
    return [".".join([*base, alias.name]) for alias in statement.names]
