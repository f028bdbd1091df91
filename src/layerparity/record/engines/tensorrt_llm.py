"""TensorRT-LLM: the tensors that its debug hook dumps of modules of the PyTorch backend.

A file is ``rank{R}/1.LlamaModel-3.LlamaDecoderLayer-1.LlamaAttention-2.Linear-{end}.{name}.pt``: of
each module from the model on its class, and how many were called before it in what holds it. What a
module returns is saved behind its arguments, all as ``output``, under the names of arguments as far
as there are any. The arguments alone are saved as ``input`` too, so that the rest was returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.record.dump_files import Dumped
from layerparity.record.engines.base import Captures, Given, by_name
from layerparity.record.name_map import Names

TITLE = "what TensorRT-LLM's debug hook dumped"
_FILE = re.compile(r"(?P<module>\d+\.\w+(?:-\d+\.\w+)*)-(?P<end>in|out)put\.(?P<at>\w+)\.pt")
_RANK = re.compile(r"rank(\d+)", re.ASCII)
# Arguments of blocks and norms, in the order in which what they return takes their names.
_ARGUMENTS = ("position_ids", "hidden_states", "attn_metadata", "residual")
# A block returns its own output, or the next one's input already normed, and the stream.
_PAIR: Names = {"layers.{n}.out/0 + layers.{n}.out/1": "layers.{n}:out"}
_NORMED: Names = {"layers.{n}.out/1": "layers.{n}:out"}
_TABLE: Names = {
    "layers.{n}.input_layernorm.out/1": "layers.{n}:in",
    "layers.{n}.post_attention_layernorm.out/1": "layers.{n}.post_attention_layernorm:in",
    "norm.out/1": "norm:in",
}
_Path = tuple[tuple[int, str], ...]
_Files = dict[_Path, dict[str, dict[str, Path]]]


def matches(folder: Path) -> bool:
    """Say whether a rank's folder holds a file of a module's."""
    ranks = [each for each in folder.iterdir() if each.is_dir() and _RANK.fullmatch(each.name)]
    return any(_FILE.fullmatch(each.name) for rank in ranks for each in rank.iterdir())


def read(given: Given) -> Captures:
    """Return what modules gave out. Raises UserError where a pass or a rank lacks a block.

    The first call of the model is the prefill, and each later one a decode step.
    """
    tensors, normed = [], False
    for where in sorted(each for each in given.folder.iterdir() if _RANK.fullmatch(each.name)):
        files: _Files = {}
        for path in sorted(where.iterdir()):
            if found := _FILE.fullmatch(path.name):
                parts = (each.split(".") for each in found["module"].split("-"))
                module = tuple((int(count), name) for count, name in parts)
                ends = files.setdefault(module, {"in": {}, "out": {}})
                ends[found["end"]][found["at"]] = path
        blocks = len(given.sizes.windows) if given.sizes else 0
        named = list(_modules(where, files, blocks))
        normed = normed or any(behind for *_, behind in named)
        rank = int(where.name.removeprefix("rank"))
        for module, step, name, _ in named:
            tensors += list(_tensors(files[module], name, rank, step))
    table = {**(_NORMED if normed else _PAIR), **_TABLE}
    return by_name(given, tensors, table, rows=_rows(given))


def _tensors(ends: dict[str, dict[str, Path]], name: str, rank: int, step: int) -> Iterator[Dumped]:
    """Yield what one call of a module returned, and the tokens that an embedding was given."""
    block = name.rpartition(".")[2].isdecimal()
    for number, at in enumerate(sorted(ends["out"].keys() - ends["in"].keys(), key=_order)):
        path = ends["out"][at]
        alone = (f"{name}.out",) if number == 0 and not block else ()
        yield Dumped(path, None, (f"{name}.out/{number}", *alone, path.stem), rank, step)
    for path in list(ends["in"].values())[:1] if name == "embed_tokens" else ():
        yield Dumped(path, None, (f"{name}.in", path.stem), rank, step)


def _order(name: str) -> tuple[int, int, str]:
    if name.isdecimal():
        return 2, int(name), name
    return (0, _ARGUMENTS.index(name), name) if name in _ARGUMENTS else (1, 0, name)


def _modules(where: Path, files: _Files, blocks: int) -> Iterator[tuple[_Path, int, str, bool]]:
    """Yield each module with its pass, its name, and whether it is a norm behind a block's MLP."""
    models = sorted({path[:-1] for path in files if path[-1][1].endswith("DecoderLayer")})
    for step, model in enumerate(models):
        inside = _inside(files, model)
        layers = [path for path in inside if path[-1][1].endswith("DecoderLayer")]
        if blocks and len(layers) != blocks:
            raise UserError(
                f"{where} holds {len(layers)} blocks of a pass, and the model has {blocks}",
                "copy every file of one run, dumped without a filter of blocks.",
            )
        for path in inside:
            if path < layers[0] and "Embedding" in path[-1][1]:
                yield path, step, "embed_tokens", False
            elif path > layers[-1] and "Norm" in path[-1][1]:
                yield path, step, "norm", False
        for n, layer in enumerate(layers):
            yield layer, step, f"layers.{n}", False
            last = n == len(layers) - 1
            after = "norm" if last else f"layers.{n + 1}.input_layernorm"
            for path, name in _of_block(files, layer):
                yield path, step, f"layers.{n}.{name}" if name else after, not name
        until = models[step + 1] if step + 1 < len(models) else ((1 << 62, ""),)
        for path in files:
            if model < path < until and len(path) == len(model) and "LMHead" in path[-1][1]:
                yield path, step, "lm_head", False


def _of_block(files: _Files, layer: _Path) -> Iterator[tuple[_Path, str]]:
    """Yield a block's modules with their names; a norm behind its MLP has none."""
    seen = ""
    for path in _inside(files, layer):
        kind = path[-1][1].lower()
        inside = [(each, each[-1][1].lower()) for each in _inside(files, path)]
        linear = [each for each, own in inside if own.endswith(("linear", "gate", "router"))]
        if "attention" in kind:
            seen = "self_attn"
            ends = {"qkv_proj": linear[:1], "o_proj": linear[-1:]} if len(linear) > 1 else {}
        elif "norm" in kind:
            norms = {"": "input_layernorm", "self_attn": "post_attention_layernorm", "mlp": ""}
            yield path, norms[seen]
            continue
        else:
            seen = "mlp"
            experts = [each for each, own in inside if "moe" in own]
            gated = {"gate_up_proj": linear[:1], "down_proj": linear[-1:]} if linear[1:] else {}
            ends = {"gate": linear[:1], "experts": experts[:1]} if "moe" in kind else gated
        yield path, seen
        yield from ((each, f"{seen}.{name}") for name, found in ends.items() for each in found)


def _inside(files: _Files, holder: _Path) -> list[_Path]:
    """Return the modules that one calls itself, in their order."""
    depth = len(holder)
    return sorted(each for each in files if len(each) == depth + 1 and each[:depth] == holder)


def _rows(given: Given) -> Sequence[int] | None:
    """Return how many tokens each sequence has; None where only the dump itself may say it."""
    try:
        return given.fed()
    except UserError:
        return None
