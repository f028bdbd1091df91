"""Guard: what a user's own port does wrong, said in one line that names port, stage and value."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from layerparity.errors import UserError
from layerparity.ports.base import Assets, Observed, Port
from layerparity.site import Site

_CHECKED = ("place", "load", "begin", "run", "new_cache", "release", "effective_weights")


def said(error: Exception) -> str:
    """Return an exception as the end of a sentence, with the line that raised it."""
    text = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}{': ' + text[0] if text else ''}{where}"


def guarded(port: Port, name: str, assets: Assets) -> Port:
    """Return the port with its methods checked: a mistake in one is a UserError.

    ``load`` must report the weights of a stage that has some; ``run`` must return an `Observed`
    whose tensors fit the batch.
    """
    for method in _CHECKED:
        plain = getattr(port, method, None)
        if plain is not None:
            setattr(port, method, _checked(plain, f"The port {name}", assets))
    return port


def _checked(plain: Callable[..., Any], name: str, assets: Assets) -> Callable[..., Any]:
    method = plain.__name__

    @functools.wraps(plain)
    def call(*args: Any, **named: Any) -> Any:
        stage = f" {args[0]}" if args and isinstance(args[0], str) else ""
        try:
            given = plain(*args, **named)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{name} {said(error)} in {method}{stage}.") from error
        problems = _PROBLEMS.get(method, _nothing)(given, assets, *args)
        for problem in problems:
            raise UserError(f"{name}: {method}{stage} {problem}")
        return given

    return call


def _nothing(*_: Any) -> Iterator[str]:
    return iter(())


def _place_problems(given: Any, assets: Assets, *_: Any) -> Iterator[str]:
    if not isinstance(given, list):
        yield f"returned {_named(given)}, not a list of Placed (it may be empty)."


def _load_problems(given: Any, assets: Assets, stage: str) -> Iterator[str]:
    if not isinstance(given, dict):
        yield f"returned {_named(given)}, not the hash of each checkpoint tensor by name."
        return
    site = Site(stage, "in")
    mark = f"{stage}." if site.layer is None else f"layers.{site.layer}."
    stored = [name for name in assets.checkpoint.weights if mark in name]
    if stored and not given:
        yield f"reports no weights, and the checkpoint holds {stored[0]}: return their hash."
    unknown = sorted(set(given) - set(assets.checkpoint.tensors))
    if unknown:
        yield f"reports '{unknown[0]}', which the checkpoint does not hold: use its stored names."


def _run_problems(given: Any, assets: Assets, stage: str, values: Any) -> Iterator[str]:
    if not isinstance(given, Observed):
        yield f"returned {_named(given)}, not an Observed."
        return
    wanted = _output_shape(assets, stage, values)
    if getattr(given.output, "shape", None) is None or tuple(given.output.shape) != wanted:
        yield f"returned {_named(given.output)} as output, {list(wanted)} is due."
    for local, tensor in given.tensors.items():
        yield from _tensor_problems(given, local, tensor, wanted[:2])


def _tensor_problems(
    given: Observed, local: str, tensor: Any, batch: tuple[int, ...]
) -> Iterator[str]:
    if ":" not in local or getattr(tensor, "shape", None) is None:
        yield f"shows '{local}' as {_named(tensor)}: name sites as mlp:out, and give tensors."
        return
    spec = given.specs.get(local)
    if spec is None or len(spec.axes) != tensor.dim():
        named = "no axes" if spec is None else f"the axes {', '.join(spec.axes)}"
        yield f"shows {local} as {_named(tensor)} with {named}: name each axis in specs."
    elif tensor.device.type != "cpu":
        yield f"shows {local} on {tensor.device.type}: bring what is observed to the CPU."
    elif tuple(tensor.shape[:2]) != batch:
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
