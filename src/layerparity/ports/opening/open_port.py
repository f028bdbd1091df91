"""Open the port that conf/port names by ``_target_``: one of ours, or a user's own, checked."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Site
from layerparity.backends.chosen import abilities_of
from layerparity.ground.errors import PortError, UserError, nearest, said
from layerparity.ground.files import text_digest
from layerparity.ports import port_loads
from layerparity.ports.base import Assets, Observed, Port
from layerparity.record.kept_tokens import KeptTokens
from layerparity.settings.config import RunKind

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_OURS = "layerparity."
# transformers' modules in one process, and split over several.
_WHOLE, _SPLIT = "layerparity.ports.known.hf.HfPort", "layerparity.ports.known._split.SplitPort"
# What makes one process compute as several ranks do.
_RANKS = ("emulate_tp", "emulate_ep")
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
    # Without ranks a port is what it was before it had them: to its user, and to its runs.
    return {k: value for k, value in keys.items() if k not in _RANKS or value is not None}


def label(chosen: Any) -> str:
    """Return a port as its user would name it: ``hf``, ``fault qkv_never_loaded at layers 0``."""
    keys = keys_of(chosen)
    target = keys.pop("_target_")
    words = [target.split(".")[-2] if _is_ours(target) else target]
    name, layers = keys.pop("name", None), keys.pop("layers", None)
    words += [str(name)] if name is not None else []
    words += [f"at layers {','.join(map(str, layers))}"] if layers is not None else []
    words += [f"{k}={v}" for k, v in keys.items() if v is not None and v is not False]
    return " ".join(words)


def identity(chosen: Any) -> dict[str, Any]:
    """Return what tells a port apart in a fingerprint: every key, and the code of a user's own."""
    keys = keys_of(chosen)
    if _is_ours(keys["_target_"]):
        sources = getattr(_resolve(keys["_target_"]), "sources", None)
        return keys if sources is None else {**keys, "source": sources(keys)}
    module = sys.modules[_resolve(keys["_target_"]).__module__]
    file = getattr(module, "__file__", None)
    top = sys.modules[module.__name__.partition(".")[0]]
    folders = [Path(each) for each in getattr(top, "__path__", ())]
    package = sorted(path for folder in folders for path in folder.rglob("*.py"))
    # A module may lean on any other of its package, one without on those beside it.
    files = (package or _beside(Path(file))) if file is not None else []
    texts = [each.read_text(encoding="utf-8") for each in files]
    return {**keys, "source": text_digest("\n".join(texts))}


def _beside(file: Path) -> list[Path]:
    """Return a module's file, and those of its folder that it imports, or that they import."""
    files = [file]
    for each in files:
        tree = ast.parse(each.read_text(encoding="utf-8"))
        named = [
            n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names
        ]
        named += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        for name in sorted({name.partition(".")[0] for name in named if name}):
            single, package = file.with_name(f"{name}.py"), file.with_name(name)
            found = [single] if single.is_file() else sorted(package.rglob("*.py"))
            files += [one for one in found if one not in files]
    return files


def check(config: Config, num_layers: int) -> None:
    """Refuse what a port of ours cannot be given; nothing heavy is imported. Raises UserError."""
    keys = chosen_for(config)
    target = keys.pop("_target_")
    # A user's own module may import anything: it is looked at when it is built.
    if _is_ours(target):
        make = _resolve(target)
        _check_keys(target, make, keys)
        refuse = getattr(make, "check", None)
        if refuse is not None:
            refuse(config, num_layers, **keys)
    if config.moe_ep_degree > 1 and not getattr(_resolve(target), "splits_experts", False):
        raise UserError(
            f"moe_ep_degree={config.moe_ep_degree}: {label(config.port)} does not split experts by "
            "number (a port that does says splits_experts = True)",
            "use moe_ep_degree=1; job=plan takes it.",
        )


def build(chosen: Any, assets: Assets) -> Port:
    """Return the port that ``config.port`` names: ``_target_`` called with assets and its keys.

    What a user's own port does wrong becomes a UserError that names it; see `guarded`.
    """
    from layerparity.ports.base import Port

    keys = keys_of(chosen)
    target = keys.pop("_target_")
    make = _resolve(target)
    _check_keys(target, make, keys)
    if _is_ours(target):
        ours: Port = make(assets, **keys)
        return ours
    try:
        port = make(assets, **keys)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The port {target} {said(error)} while it was made.") from error
    if not isinstance(port, Port):
        raise UserError(
            f"{target} gave {type(port).__name__}, not a port: derive it from "
            "layerparity.porting.Port."
        )
    return guarded(port, target, assets)


def chosen_for(config: Config) -> dict[str, Any]:
    """Return the keys of the port that runs a configuration.

    transformers' modules are another class where they are split over processes. Raises UserError
    for a golden run that is split.
    """
    keys = keys_of(config.port)
    if config.tp_degree == 1 or keys["_target_"] != _WHOLE:
        return keys
    # Others split a model in one process.
    if abilities_of(config).ranks is None:
        return keys
    if not keys.keys().isdisjoint(_RANKS):
        # Both at once is refused there.
        return keys
    if config.kind is RunKind.golden:
        raise UserError(
            f"A golden run is not split over {config.tp_degree} ranks: it is what split runs are "
            "judged by",
            "use tp_degree=1, and device_map=balanced for several GPUs.",
        )
    return {**keys, "_target_": _SPLIT}


def ranks_device(config: Config, *, importing: bool = False) -> str:
    """Return what a port computes on in processes of its own; else nothing.

    A user's own is imported where the command asks for several ranks, or where ``importing`` says
    that it may be: what it imports goes by the backend's environment.
    """
    target = chosen_for(config)["_target_"]
    if not (importing or config.tp_degree > 1 or _is_ours(target)):
        return ""
    made = _resolve(target)
    where = getattr(made, "where", None) if hasattr(made, "side") or _is_ours(target) else None
    return "" if where is None else str(where(config))


def maps_devices(config: Config) -> bool:
    """Say whether the port that runs a configuration goes by ``device_map`` itself."""
    return bool(getattr(_resolve(chosen_for(config)["_target_"]), "maps_devices", False))


def is_transformers(chosen: Any) -> bool:
    """Say whether a port is transformers' own modules, ``port=hf``, and not as ranks compute."""
    keys = keys_of(chosen)
    return keys["_target_"] == _WHOLE and all(keys.get(each) is None for each in _RANKS)


def is_ours(chosen: Any) -> bool:
    """Say whether a port is this package's own."""
    return _is_ours(keys_of(chosen)["_target_"])


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
    make: Callable[..., Any] = found
    return make


def _import(path: str, target: str) -> Any:
    if not _is_ours(target):
        port_loads.watch(target)
    if (known := sys.modules.get(path)) is not None:
        return known
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


_CHECKED = (
    "place",
    "load",
    "begin",
    "run",
    "new_cache",
    "taking_back",
    "cached",
    "cache_rows",
    "refill",
    "release",
    "computes_on",
    "effective_weights",
)


def guarded(port: Port, name: str, assets: Assets) -> Port:
    """Return the port with its methods checked: a mistake in one is a UserError.

    ``load`` must report the weights of a stage that has some; ``run`` must return an `Observed`
    whose tensors fit the batch.
    """
    guard = _Guard(assets)
    for method in _CHECKED:
        plain = getattr(port, method, None)
        if plain is not None:
            setattr(port, method, _checked(plain, f"The port {name}", guard))
    return port


@dataclasses.dataclass
class _Guard:
    """What a port's answers are held against: its assets, and the tokens looked at in its pass."""

    assets: Assets
    kept: KeptTokens = dataclasses.field(default_factory=KeptTokens)


def _checked(plain: Callable[..., Any], name: str, guard: _Guard) -> Callable[..., Any]:
    method = plain.__name__

    @functools.wraps(plain)
    def call(*args: Any, **named: Any) -> Any:
        if method == "begin" and args:
            guard.kept = args[0].kept
        stage = f" {args[0]}" if args and isinstance(args[0], str) else ""
        try:
            result = plain(*args, **named)
        except UserError:
            raise
        except Exception as error:
            raise PortError(f"{name} {said(error)} in {method}{stage}.") from error
        for problem in _PROBLEMS[method](result, guard, *args) if method in _PROBLEMS else ():
            raise UserError(f"{name}: {method}{stage} {problem}")
        # What a port hands out to be called later is its own code, too.
        return _checked(result, name, guard) if inspect.isfunction(result) else result

    return call


def _place_problems(given: Any, guard: _Guard, *_: Any) -> Iterator[str]:
    if not isinstance(given, list):
        yield f"returned {_named(given)}, not a list of Placed (it may be empty)."


def _load_problems(given: Any, guard: _Guard, stage: str) -> Iterator[str]:
    if not isinstance(given, dict):
        yield f"returned {_named(given)}, not the hash of each checkpoint tensor by name."
        return
    site = Site(stage, "in")
    mark = f"{site.place.stage}."
    stored = [name for name in guard.assets.checkpoint.tensors if mark in name]
    if stored and not given:
        yield f"reports no weights, and the checkpoint holds {stored[0]}: return their hash."
    checkpoint = guard.assets.checkpoint
    unknown = sorted(set(given) - checkpoint.tensors.keys() - checkpoint.stored.keys())
    if unknown:
        yield f"reports '{unknown[0]}', which the checkpoint does not hold: use its stored names."


def _run_problems(given: Any, guard: _Guard, stage: str, values: Any) -> Iterator[str]:
    if not isinstance(given, Observed):
        yield f"returned {_named(given)}, not an Observed."
        return
    wanted = _output_shape(guard.assets, stage, values)
    if getattr(given.output, "shape", None) is None or tuple(given.output.shape) != wanted:
        yield f"returned {_named(given.output)} as output, {list(wanted)} is due."
    batch = wanted[:2]
    # It may leave out what is not looked at.
    fewer = (batch[0], len(guard.kept.columns) if guard.kept else batch[1])
    for local, tensor in given.tensors.items():
        spec = given.specs.get(local)
        if ":" not in local or getattr(tensor, "shape", None) is None:
            yield f"shows '{local}' as {_named(tensor)}: name sites as mlp:out, and give tensors."
        elif spec is None or len(spec.axes) != tensor.dim():
            axes = "no axes" if spec is None else f"the axes {', '.join(spec.axes)}"
            yield f"shows {local} as {_named(tensor)} with {axes}: name each axis in specs."
        elif tensor.device.type != "cpu":
            yield f"shows {local} on {tensor.device.type}: bring what is observed to the CPU."
        elif tuple(tensor.shape[:2]) not in (batch, fewer):
            yield f"shows {local} as {_named(tensor)}: {list(batch)} is the batch and its tokens."


def _output_shape(assets: Assets, stage: str, values: Any) -> tuple[int, ...]:
    config = assets.checkpoint.config
    if stage == "embed_tokens":
        return (*values.shape, int(config["hidden_size"]))
    if stage == "lm_head":
        return (*values.shape[:-1], int(config["vocab_size"]))
    return tuple(values.shape)


def _named(value: Any) -> str:
    """Return a value as a message shows it: a tensor's shape, else its type."""
    shape = getattr(value, "shape", None)
    return f"a tensor {list(shape)}" if shape is not None else type(value).__name__


_PROBLEMS: dict[str, Callable[..., Iterator[str]]] = {
    "place": _place_problems,
    "load": _load_problems,
    "run": _run_problems,
}
