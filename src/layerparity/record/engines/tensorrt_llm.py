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
from layerparity.record.dump_files import Dumped, sole
from layerparity.record.engines.base import Captures, Given, by_name, stream

TITLE = "what TensorRT-LLM's debug hook dumped"
_FILE = re.compile(r"(?P<module>\d+\.\w+(?:-\d+\.\w+)*)-(?P<end>in|out)put\.(?P<at>\w+)\.pt")
_RANK = re.compile(r"rank(\d+)", re.ASCII)
# Arguments of blocks and norms, in the order in which what they return takes their names.
_ARGUMENTS = ("position_ids", "hidden_states", "attn_metadata", "residual")
_Path = tuple[tuple[int, str], ...]
_Files = dict[_Path, dict[str, dict[str, Path]]]


def matches(folder: Path) -> bool:
    """Say whether a rank's folder holds a file of a module's."""
    found = (each for each in folder.glob("rank*/*.pt") if _RANK.fullmatch(each.parent.name))
    return any(_FILE.fullmatch(each.name) for each in found)


def read(given: Given) -> Captures:
    """Return what modules gave out.

    Raises UserError where a pass or a rank lacks a block, and for a longer prompt than was fed.

    The first call of the model is the prefill, and each later one a decode step.
    """
    tensors: list[Dumped] = []
    normed, of = False, 0
    for where in sorted(each for each in given.folder.iterdir() if _RANK.fullmatch(each.name)):
        files: _Files = {}
        for path in sorted(where.iterdir()):
            if found := _FILE.fullmatch(path.name):
                pairs = (each.split(".") for each in found["module"].split("-"))
                module = tuple((int(count), name) for count, name in pairs)
                files.setdefault(module, {"in": {}, "out": {}})[found["end"]][found["at"]] = path
        for module, step, name, behind in _modules(where, files, given.blocks):
            rank, normed = int(where.name.removeprefix("rank")), normed or behind
            tensors += list(_tensors(files[module], name, rank, step))
    fused = [each for each in tensors if each.names[0].endswith(".qkv_proj.out/0")]
    if fused and not any(each.rank for each in tensors):
        of = given.ranks_of(sole(fused[0].path).shape[-1])
    table = stream("layers.{n}.out/1") if normed else stream()
    if rows := given.rows():
        _refuse_longer(given.folder, tensors, rows)
    return by_name(given, tensors, table, rows=rows, of=of)


def _refuse_longer(folder: Path, tensors: Sequence[Dumped], rows: Sequence[int]) -> None:
    """Raise UserError where what comes behind the tokens that were fed goes on with others.

    Logits, or a decode step, are then of the last token of a longer prompt. Those of other requests
    may stand behind them: these have rows of their own.
    """
    own = [each for each in tensors if each.rank == 0]
    prefill = (e for e in own if not e.step and e.names[0].startswith(("embed", "layers.")))
    ends = (e for e in own if e.step or e.names[0].startswith("lm_head"))
    if (first := next(prefill, None)) is None or (last := next(ends, None)) is None:
        return
    tokens, behind = (sole(each.path).shape[0] for each in (first, last))
    if behind <= len(rows) and tokens > sum(rows):
        raise UserError(
            f"{folder} was fed {tokens} tokens, and {sum(rows)} are said",
            "give all that it was fed, or leave them out, where the embedding was dumped.",
        )


def _tensors(ends: dict[str, dict[str, Path]], name: str, rank: int, step: int) -> Iterator[Dumped]:
    """Yield what one call of a module returned, and the tokens that an embedding was given."""
    block = name.rpartition(".")[2].isdecimal()
    for number, at in enumerate(sorted(ends["out"].keys() - ends["in"].keys(), key=_order)):
        path, alone = ends["out"][at], (f"{name}.out",) if number == 0 and not block else ()
        yield Dumped(path, None, (f"{name}.out/{number}", *alone, path.stem), rank, step)
    for path in list(ends["in"].values())[:1] if name == "embed_tokens" else ():
        yield Dumped(path, None, (f"{name}.in", path.stem), rank, step)


def _order(name: str) -> tuple[int, str]:
    return [*_ARGUMENTS, name].index(name) + len(name) * 9 * name.isdecimal(), name


def _modules(where: Path, files: _Files, blocks: int) -> Iterator[tuple[_Path, int, str, bool]]:
    """Yield each module with its pass, its name, and whether it is a norm behind a block's MLP."""
    models = sorted({path[:-1] for path in files if path[-1][1].endswith("DecoderLayer")})
    for step, model in enumerate(models):
        layers = [p for p in _inside(files, model) if p[-1][1].endswith("DecoderLayer")]
        if blocks and len(layers) != blocks:
            raise UserError(
                f"{where} holds {len(layers)} blocks of a pass, and the model has {blocks}",
                "copy every file of one run, dumped without a filter of blocks.",
            )
        for path in _inside(files, model):
            first = path < layers[0]
            kind, name = ("Embedding", "embed_tokens") if first else ("Norm", "norm")
            if path not in layers and kind in path[-1][1]:
                yield path, step, name, False
        for n, layer in enumerate(layers):
            yield layer, step, f"layers.{n}", False
            after = f"layers.{n + 1}.input_layernorm" if layer < layers[-1] else "norm"
            for path, name in _of_block(files, layer):
                yield path, step, f"layers.{n}.{name}" if name else after, not name
    for path in files:
        if path > models[0] and "LMHead" in path[-1][1]:
            yield path, sum(each < path for each in models) - 1, "lm_head", False


def _of_block(files: _Files, layer: _Path) -> Iterator[tuple[_Path, str]]:
    """Yield a block's modules with their names; a norm behind its MLP has none."""
    modules = _inside(files, layer)
    # Without attention nothing tells which norm is which, until the MLP.
    seen = "" if any("Attention" in each[-1][1] for each in modules) else "?"
    for path in modules:
        kind = path[-1][1].lower()
        inside = _inside(files, path)
        linear = [e for e in inside if e[-1][1].lower().endswith(("linear", "gate", "router"))]
        if "attention" in kind:
            seen = "self_attn"
            ends = {"qkv_proj": linear[:1], "o_proj": linear[-1:]} if len(linear) > 1 else {}
        elif "norm" in kind:
            norms = {"": "input_layernorm", "self_attn": "post_attention_layernorm", "mlp": ""}
            yield from ((path, norms[seen]),) if seen in norms else ()
            continue
        else:
            seen = "mlp"
            experts = [each for each in inside if "moe" in each[-1][1].lower()]
            gated = {"gate_up_proj": linear[:1], "down_proj": linear[-1:]} if linear[1:] else {}
            ends = {"gate": linear[:1], "experts": experts[:1]} if "moe" in kind else gated
        yield path, seen
        yield from ((each, f"{seen}.{name}") for name, found in ends.items() for each in found)


def _inside(files: _Files, holder: _Path) -> list[_Path]:
    """Return the modules that one calls itself, in their order."""
    return sorted(each for each in files if each[:-1] == holder)
