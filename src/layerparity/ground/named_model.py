"""Find the module that ``port.model`` names without importing anything: torch takes seconds."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from layerparity.ground.errors import UserError, nearest, said
from layerparity.ground.files import expanded


def refuse_missing(target: str, paths: Sequence[str], example: str) -> str:
    """Return the text of the module that holds a class, empty where only its import tells it.

    Raises UserError, with the cure, for a folder that is none, and a module that is nowhere. A
    package that computes its own ``__path__`` is believed. ``example`` is how a class is named.
    """
    names = target.split(".")[:-1]
    if not names:
        raise UserError(f"port.model={target} is no dotted path", f"write {example}.")
    spec = top_module(names[0], paths)
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        if count > 1:
            assert spec is not None
            if _computes_its_path(spec):
                return ""
            # By its own name alone: a folder without __init__.py asks for its parent's import.
            spec = PathFinder.find_spec(
                names[count - 1], [*(spec.submodule_search_locations or ())]
            )
        if spec is None:
            raise no_module(target, name)
    return _text(spec.origin) if spec is not None and spec.origin else ""


def top_module(name: str, paths: Sequence[str]) -> ModuleSpec | None:
    """Return where a package or module lies, None where it is nowhere; it is not imported.

    Raises UserError for one of ``paths`` that is no folder.
    """
    for path in paths:
        if not expanded(path).is_dir():
            raise UserError(f"port.path names {path}, which is no folder", "give its folder.")
    folders = [*(str(expanded(each)) for each in paths), str(Path.cwd()), *sys.path]
    # importlib's own find_spec would import each package on the way.
    return PathFinder.find_spec(name, folders) or _hooked(name)


def class_named(target: str) -> type:
    """Import the class that ``port.model`` names, from Python's path. Raises UserError."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # What is not found may be the module itself or one that it imports: their cures differ.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise no_module(target, error.name) from error
        raise UserError(
            f"port.model={target}: importing {module_name} {said(error)}",
            "install what it imports, or name its folder in port.path=[...].",
        ) from error
    except Exception as error:
        raise UserError(f"port.model={target}: importing {module_name} {said(error)}") from error
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        known = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise UserError(
            f"port.model={target}: {module_name} has no class '{name}'.{nearest(name, known)}"
        )
    return found


def no_module(target: str, name: str) -> UserError:
    """Return the refusal of a module that is not there."""
    return UserError(
        f"port.model={target}: there is no module '{name}'",
        "name the folder that holds it in port.path=[...] or PYTHONPATH.",
    )


def _hooked(name: str) -> ModuleSpec | None:
    """Return a top module of a finder other than the path's, as an editable install has one."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _computes_its_path(package: ModuleSpec) -> bool:
    # A namespace package has no file of its own, and a module may make itself a package.
    return package.origin is not None and "__path__" in _text(package.origin)


def _text(origin: str) -> str:
    try:
        return Path(origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        # A built-in module: it is believed as well.
        return "__path__"
