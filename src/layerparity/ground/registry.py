"""Find plug-ins by name: a module in a package is one backend, family, port, inputs or job."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType

from layerparity.ground.errors import UserError, nearest


@cache
def names(package: str) -> tuple[str, ...]:
    """Return the names of the plug-ins in ``layerparity.<package>``, sorted; none is imported."""
    path = importlib.import_module(f"layerparity.{package}").__path__
    modules = (module.name for module in pkgutil.iter_modules(path))
    return tuple(sorted(name for name in modules if not name.startswith("_") and name != "base"))


@cache
def holding(package: str, symbol: str) -> tuple[str, ...]:
    """Return the names of the plug-ins that define ``symbol`` at top level; none is imported."""
    defined = f"{symbol} ="
    return tuple(
        name
        for name in names(package)
        if any(line.startswith(defined) for line in source(package, name).splitlines())
    )


def source(package: str, name: str) -> str:
    """Return the text of a plug-in's file, empty where it has none; it is not imported."""
    spec = importlib.util.find_spec(f"layerparity.{package}.{name}")
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text("utf-8")


def check(package: str, name: str) -> None:
    """Raise UserError with the nearest known name where there is no such plug-in."""
    known = names(package)
    if name not in known:
        raise UserError(
            f"There is no '{name}' in {package}.{nearest(name, known)} Known: {', '.join(known)}."
        )


def load(package: str, name: str) -> ModuleType:
    """Import one plug-in. Raises UserError with the nearest known name where there is none."""
    check(package, name)
    return importlib.import_module(f"layerparity.{package}.{name}")
