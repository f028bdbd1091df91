"""Layer-by-layer numerical parity between two machines that run the same language model.

``run``, ``compare``, ``bisect``, ``open_run``, ``open_comparison`` and ``open_bisection`` are what
a Python program calls; `layerparity.cli.python` describes them. They are imported when first used,
so that importing this package costs nothing; type checkers read ``__init__.pyi``.

Former paths of modules, which authors of ports import and stored runs name, work until 0.2: each
gives the very module that took its place, with a DeprecationWarning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PORTING = "layerparity.porting"
# By former path: the module that took its place, and the path to write instead.
_MOVED = {
    "layerparity.errors": ("layerparity.ground.errors", _PORTING),
    "layerparity.site": ("layerparity.anatomy.site", _PORTING),
    "layerparity.models.prints": ("layerparity.model.prints", _PORTING),
    "layerparity.ports.base": ("layerparity.run.ports.base", _PORTING),
    **{
        f"layerparity.ports.{name}": (f"layerparity.run.ports.{name}",) * 2
        for name in ("hf", "fault", "clean")
    },
}
_PACKAGES = ("layerparity.models", "layerparity.ports")


_PUBLIC = {
    **dict.fromkeys(
        ("bisect", "compare", "open_bisection", "open_comparison", "open_run"),
        "layerparity.cli.python",
    ),
    **dict.fromkeys(("Bisection", "Comparison", "Run"), "layerparity.report.notebook"),
    "UserError": "layerparity.ground.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == "run":
        # A package of ours that can be called like the others: see its ``__init__``.
        return importlib.import_module("layerparity.run")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return what is here, and the public names that were not asked for yet."""
    return sorted({*globals(), *_PUBLIC, "run"})


def path_today(target: str) -> str:
    """Return the dotted path of what ``target`` named when it was stored."""
    path, dot, name = target.rpartition(".")
    return f"{_MOVED[path][0]}{dot}{name}" if path in _MOVED else target


class _FormerPaths(MetaPathFinder, Loader):
    """Finds modules by their former paths, asked only after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _MOVED and fullname not in _PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that took the place of a former one where the import looks for it."""
        name = module.__name__
        if name in _MOVED:
            there, write = _MOVED[name]
            sys.modules[name] = importlib.import_module(there)
            # The import system's own frames are not counted: this is the line that imports.
            warnings.warn(f"{name} has moved: import {write}", DeprecationWarning, stacklevel=2)


sys.meta_path.append(_FormerPaths())
