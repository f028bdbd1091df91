"""Which module's output a tensor of an ONNX graph is, as the exporter wrote it down.

The file is read as what protobuf makes of it, without the package ``onnx``: names alone are wanted,
and weights are skipped. torch.onnx keeps the modules that a node came from in its metadata; its
older exporter, in the names of tensors (``/model/layers.0/mlp/Mul_output_0``).
"""

from __future__ import annotations

import ast
import mmap
from collections.abc import Iterator
from pathlib import Path

from layerparity.ground.files import reading

_GRAPH, _NODE, _OUTPUT, _METADATA, _KEY, _VALUE = 7, 1, 2, 9, 1, 2
_SCOPES = b"pkg.torch.onnx.name_scopes"
_CURE = "export the model again, with torch.onnx.export"


def module_outputs(path: Path) -> dict[str, list[str]]:
    """Return, by the name of a tensor, the modules that put it out: a module's last node does.

    Raises UserError for a file that is no ONNX model.
    """
    last: dict[str, str] = {}
    with reading(path, _CURE), path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for tensor, scopes in _nodes(data):
            last |= dict.fromkeys(scopes, tensor)
    found: dict[str, list[str]] = {}
    for module, tensor in last.items():
        found.setdefault(tensor, []).append(module)
    return found


def _nodes(data: mmap.mmap) -> Iterator[tuple[str, list[str]]]:
    """Yield each node's first output, and the modules that it is in, in the graph's order."""
    for number, *graph in _fields(data, 0, len(data)):
        for kind, *node in _fields(data, *graph) if number == _GRAPH else ():
            if kind != _NODE:
                continue
            outputs, scopes = [], []
            for part, start, end in _fields(data, *node):
                if part == _OUTPUT:
                    outputs.append(data[start:end].decode())
                elif part == _METADATA:
                    pair = {key: data[a:b] for key, a, b in _fields(data, start, end)}
                    if pair.get(_KEY) == _SCOPES:
                        scopes = _listed(pair.get(_VALUE, b""))
            if outputs:
                parts = outputs[0].split("/")[1:-1]
                yield outputs[0], scopes or [".".join(parts[: n + 1]) for n in range(len(parts))]


def _listed(text: bytes) -> list[str]:
    """Return the modules of a node, which its own name stands behind. ValueError for others."""
    try:
        scopes = ast.literal_eval(text.decode())
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("its scopes are no list") from error
    return [each for each in scopes[:-1] if each] if isinstance(scopes, list) else []


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the start and the end of each field that has a length. ValueError."""
    while at < end:
        tag, at = _number(data, at)
        size = {0: 0, 1: 8, 2: 0, 5: 4}.get(tag & 7)
        if size is None:
            raise ValueError("it is no ONNX model")
        if tag & 7 in (0, 2):
            value, at = _number(data, at)
            size = value if tag & 7 == 2 else 0
        if at + size > end:
            raise ValueError("it ends too early")
        if tag & 7 == 2:
            yield tag >> 3, at, at + size
        at += size


def _number(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and where it ends. Raises ValueError."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, at + place + 1
    raise ValueError("it ends too early")
