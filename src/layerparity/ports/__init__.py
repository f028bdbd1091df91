"""Ports: implementations that are judged; conf/port names one, or a user's own, by ``_target_``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.errors import UserError, nearest
from layerparity.files import text_digest

if TYPE_CHECKING:
    from layerparity.config import Config
    from layerparity.ports.base import Assets, Port

_OURS = "layerparity."
_EXAMPLE = "port._target_=their.module.Port"


def keys_of(chosen: Any) -> dict[str, Any]:
    """Return the keys of ``config.port`` as plain values, ``_target_`` among them."""
    if dataclasses.is_dataclass(chosen) and not isinstance(chosen, type):
        return dataclasses.asdict(chosen)
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("_target_"), str):
        raise UserError(f"port has no _target_: choose port=hf, or give {_EXAMPLE}.")
    keys = {str(key): value for key, value in chosen.items()}
    if keys.get("replay") is False and not _is_ours(keys["_target_"]):
        # conf/port/hf.yaml's own, which a user's port is chosen over.
        del keys["replay"]
    return keys


def label(chosen: Any) -> str:
    """Return a port as its user would name it: ``hf``, ``fault qkv_never_loaded at layers 0``."""
    keys = keys_of(chosen)
    target = keys.pop("_target_")
    words = [target.split(".")[2] if _is_ours(target) else target]
    name, layers = keys.pop("name", None), keys.pop("layers", None)
    words += [str(name)] if name is not None else []
    words += [f"at layers {','.join(map(str, layers))}"] if layers is not None else []
    told = {key: value for key, value in keys.items() if value is not None and value is not False}
    words += [f"{key}={value}" for key, value in told.items()]
    return " ".join(words)


def identity(chosen: Any) -> dict[str, Any]:
    """Return what tells a port apart in a fingerprint: every key, and the code of a user's own."""
    keys = keys_of(chosen)
    if _is_ours(keys["_target_"]):
        return keys
    module = sys.modules[_resolve(keys["_target_"]).__module__]
    return {**keys, "source": text_digest("\n".join(_sources(module)))}


def check(chosen: Any, config: Config, num_layers: int) -> None:
    """Refuse what a port of ours cannot be given; nothing heavy is imported. Raises UserError."""
    keys = keys_of(chosen)
    target = keys.pop("_target_")
    if not _is_ours(target):
        # A user's own module may import anything: it is looked at when it is built.
        return
    make = _resolve(target)
    _check_keys(target, make, keys)
    refuse = getattr(make, "check", None)
    if refuse is not None:
        refuse(config, num_layers, **keys)


def build(chosen: Any, assets: Assets) -> Port:
    """Return the port that ``config.port`` names: ``_target_`` called with assets and its keys.

    What a user's own port does wrong becomes a UserError that names it; see `_guard`.
    """
    from layerparity.ports._guard import guarded, said
    from layerparity.ports.base import Port

    keys = keys_of(chosen)
    target = keys.pop("_target_")
    make = _resolve(target)
    _check_keys(target, make, keys)
    if _is_ours(target):
        ours: Port = make(assets, **keys)
        return ours
    try:
        made = make(assets, **keys)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The port {target} {said(error)} while it was made.") from error
    if not isinstance(made, Port):
        raise UserError(
            f"{target} gave {type(made).__name__}, not a port: derive it from "
            "layerparity.ports.base.Port."
        )
    return guarded(made, target, assets)


def _is_ours(target: str) -> bool:
    return target.startswith(_OURS)


def _resolve(target: str) -> Callable[..., Any]:
    """Import what a dotted path names. Raises UserError with the cure."""
    path, _, name = target.rpartition(".")
    if not path or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"port._target_={target} is no dotted path: write {_EXAMPLE}.")
    module = _import(path, target)
    found = getattr(module, name, None)
    if found is None:
        known = [each for each in vars(module) if not each.startswith("_")]
        raise UserError(f"port._target_={target}: {path} has no '{name}'.{nearest(name, known)}")
    if not callable(found):
        raise UserError(f"port._target_={target} is no class and no function: write {_EXAMPLE}.")
    return found


def _import(path: str, target: str) -> Any:
    from layerparity.ports._guard import said

    # A console script does not look for modules where it is run; a user's own port stands there.
    if not _is_ours(target) and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise UserError(f"port._target_={target}: importing {path} {said(error)}.") from error
        raise UserError(
            f"port._target_={target}: there is no module '{error.name}'. Run from the folder that "
            "holds it, or name that folder in PYTHONPATH."
        ) from error
    except Exception as error:
        raise UserError(f"port._target_={target}: importing {path} {said(error)}.") from error


def _check_keys(target: str, make: Callable[..., Any], keys: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:
        return
    try:
        signature.bind(None, **keys)
    except TypeError as error:
        known = [*signature.parameters][1:]
        takes = f"It takes {', '.join(known)}." if known else "It takes no key."
        raise UserError(f"The port {target}: {error}. {takes}") from error


def _sources(module: Any) -> list[str]:
    """Return the text of a module, and of all others of its package."""
    file = getattr(module, "__file__", None)
    if file is None:
        return []
    top = sys.modules[module.__name__.partition(".")[0]]
    folders = [Path(each) for each in getattr(top, "__path__", ())]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [each.read_text(encoding="utf-8") for each in files or [Path(file)]]
