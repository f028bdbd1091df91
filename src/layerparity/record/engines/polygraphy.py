"""Outputs of an ONNX model: Polygraphy's RunResults (a .json), or a .npz of a session's.

The JSON holds each runner's iterations, ``{"lst": [[runner, [{"outputs": {...}}]]]}``, an array as
base64 of a .npy. Which module put a tensor out, the .onnx file beside it says.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.files import reading
from layerparity.ground.parse import parse_json
from layerparity.record.dump_files import CURE, Dumped, find_tensors
from layerparity.record.engines._onnx_graph import module_outputs
from layerparity.record.engines.base import Captures, Given, by_name, unwrapped

TITLE = "outputs of an ONNX model (Polygraphy, or .npz)"
_BEGIN = re.compile(rb'\s*\{\s*"lst"\s*:')
_ARRAY = re.compile(rb'("array"\s*:\s*")([^"]*)')
_LOOKED_AT = 64
_CURE = "keep one run of one model in a file"
_TABLE = {"input_ids": "embed_tokens:in", "logits": "lm_head:out"}


def matches(folder: Path) -> bool:
    """Say whether a file holds RunResults, or an ONNX model lies beside a .npz."""
    held = {each.suffix for each in folder.iterdir()}
    return {".onnx", ".npz"} <= held or bool(_results(folder))


def read(given: Given) -> Captures:
    """Return the outputs. Raises UserError for several runs, and where nothing names modules."""
    models = sorted(given.folder.glob("*.onnx"))
    results = _results(given.folder)
    if len(models) > 1 or len(results) > 1:
        raise UserError(f"{given.folder} holds several models, or runs", f"{_CURE}, in a folder.")
    modules = module_outputs(models[0]) if models else {}
    named = [(each, key) for path in results for each, key in _arrays(path)]
    if not results:
        named = [(each, each.key or "") for each in find_tensors(given.folder)]
    tensors = []
    for each, name in named:
        known = [f"{unwrapped(module)}.out" for module in modules.get(name, ())]
        names = (*known, name, f"{unwrapped(name)}.out", *each.names)
        tensors.append(Dumped(each.path, each.key, tuple(dict.fromkeys(names))))
    if not models and given.map is None:
        raise UserError(
            f"{given.folder} holds no .onnx file, and the names of an ONNX graph are numbers",
            "put the model beside its outputs (weights in another file are not needed), or write "
            'names.json, such as {"add_12": "layers.0:out"}.',
        )
    return by_name(given, tensors, _TABLE)


def _results(folder: Path) -> list[Path]:
    """Return the files that begin as RunResults do."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with path.open("rb") as file:
            if _BEGIN.match(file.read(_LOOKED_AT)):
                found.append(path)
    return found


def _arrays(path: Path) -> Iterator[tuple[Dumped, str]]:
    """Yield the arrays of a run, each with its name. Raises UserError where there are several."""
    with reading(path, CURE), path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        spans = [each.span(2) for each in _ARRAY.finditer(data)]
        # What is between the arrays is small: each is replaced by its number.
        ends = [0, *(end for _, end in spans)]
        between = zip(ends[:-1], spans, strict=True)
        pieces = [data[end:start] + b"%d" % n for n, (end, (start, _)) in enumerate(between)]
        told = parse_json((b"".join(pieces) + data[ends[-1] :]).decode())
        try:
            runs = [
                (
                    runner,
                    {name: int(each["values"]["array"]) for name, each in run["outputs"].items()},
                )
                for runner, iterations in told["lst"]
                for run in iterations
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("it holds no arrays of outputs") from error
    if len(runs) != 1:
        names = ", ".join(dict.fromkeys(str(runner) for runner, _ in runs))
        raise UserError(f"{path} holds {len(runs)} runs ({names})", f"{_CURE}.")
    for name, number in runs[0][1].items():
        key = "{}:{}".format(*spans[number])
        yield Dumped(path, key, (f"{path.stem}/{name}",)), name
