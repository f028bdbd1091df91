"""msprobe: the tensors that PrecisionDebugger dumps of modules (level L0, or mix).

A file is ``step{S}/{rank{R}|proc{PID}}/dump_tensor_data/Module.{MODULE}.{CLASS}.forward.{CALL}.
{input|output}.{ARGUMENT}.pt``; beside the folder, dump.json names all files. Steps are what the
user's loop says, and calls those of one module within a step: both may be passes of a generation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.files import reading
from layerparity.record.dump_files import Dumped
from layerparity.record.engines.base import Captures, Given, by_name, stream, usual
from layerparity.record.name_map import Names

TITLE = "what msprobe's PrecisionDebugger dumped"
_TENSORS = "dump_tensor_data"
_FILE = re.compile(
    r"(?:Module|Cell)\.(?P<module>.+)\.\w+\.forward\.(?P<call>\d+)"
    r"\.(?P<end>in|out)put\.(?P<at>\w+(?:\.\w+)*)\.(?:pt|npy)",
    re.ASCII,
)
_WEIGHT = re.compile(r".+\.parameters\.\w+\.(?:pt|npy)")
_STEP, _RANK = re.compile(r"step(\d+)", re.ASCII), re.compile(r"(?:rank|proc)(\d+)", re.ASCII)
_NAMED = re.compile(r'"data_name":\s*"([^"]+)"')
_ADDS = re.compile(r"layernorm\.out\.1$")
_PLAIN = re.compile(r"(?:embed_tokens|lm_head|_proj)\.in$")
_CURE = "copy the whole folder of each step and rank, with its dump.json"
# What a router of transformers gives out beside its logits.
_ROUTERS: Names = {
    f"layers.{{n}}.{mlp}.{gate}.out/{at}": f"layers.{{n}}.mlp.gate:{end}"
    for mlp in ("mlp", "block_sparse_moe")
    for gate in ("gate", "router")
    for at, end in enumerate(("logits", "weights", "choices"))
}


def matches(folder: Path) -> bool:
    """Say whether a folder, or one of a step or rank in it, holds tensors of msprobe."""
    return any(_folders(folder))


def read(given: Given) -> Captures:
    """Return what modules took in and gave out. UserError where a file that was dumped is missing.

    Raises UserError as well for processes that have no rank, where there are several.
    """
    files, weights = [], 0
    for where in _folders(given.folder):
        step, rank = _number(where, _STEP), _rank(where)
        held = {each.name: each for each in where.iterdir()}
        _refuse_missing(where, set(held))
        weights += sum(bool(_WEIGHT.fullmatch(name)) for name in held)
        found = ((_FILE.fullmatch(name), path) for name, path in sorted(held.items()))
        files += [(step, rank, match, path) for match, path in found if match]
    _refuse_processes(given.folder, {rank for _, rank, *_ in files})
    ranks = {own: n if own < 0 else own for n, own in enumerate(sorted({r for _, r, *_ in files}))}
    passes = sorted({(step, int(match["call"])) for step, _, match, _ in files})
    number = {each: n for n, each in enumerate(passes)}
    pairs = any(
        _ADDS.search(f"{match['module']}.{match['end']}.{match['at']}") for *_, match, _ in files
    )
    tensors = []
    for step, rank, match, path in files:
        full = f"{match['module']}.{match['end']}"
        module, at = usual(full), match["at"].replace(".", "/")
        # What a module is fed is its first argument, or one of that name.
        alone = at == "0" or (match["end"] == "in" and at == "hidden_states")
        # Norms that add, and their blocks, are fed the stream in two parts, behind positions.
        alone = alone and not (pairs and match["end"] == "in" and not _PLAIN.search(module))
        names = (f"{module}/{at}", *((module,) if alone else ()), f"{full}/{at}", path.stem)
        own = (step, int(match["call"]))
        tensors.append(Dumped(path, None, names, ranks[rank], number[own]))
    notes = [f"{weights} weights that msprobe dumped are not looked at"] if weights else []
    table = {**_ROUTERS, **(stream() if pairs else {})}
    return by_name(given, tensors, table, notes=notes)


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of tensors: of every step and rank, or of the one that is given."""
    for pattern in (_TENSORS, f"*/{_TENSORS}", f"*/*/{_TENSORS}"):
        yield from sorted(folder.glob(pattern))


def _number(where: Path, name: re.Pattern[str]) -> int:
    found = next((m for each in where.parts[-3:] if (m := name.fullmatch(each))), None)
    return int(found[1]) if found else 0


def _rank(where: Path) -> int:
    """Return a folder's rank; below 0 what a process has instead, which tells it from others."""
    number = _number(where, _RANK)
    return -1 - number if where.parent.name.startswith("proc") else number


def _refuse_missing(where: Path, held: set[str]) -> None:
    path = where.parent / "dump.json"
    with reading(path, _CURE):
        named = _NAMED.findall(path.read_text(encoding="utf-8"))
    for name in named:
        if name not in held:
            raise UserError(f"{where} holds no {name}, which its dump.json names", f"{_CURE}.")


def _refuse_processes(folder: Path, ranks: set[int]) -> None:
    if len(ranks) > 1 and min(ranks) < 0:
        raise UserError(
            f"{folder} holds what {len(ranks)} processes dumped, and not of which ranks",
            "keep one process's folder of one run, or call each rank's rank0, rank1, ...",
        )
