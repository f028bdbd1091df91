"""ModelCapture: the files that a vLLM Neuron model leaves, pass by pass, request by request.

A file is ``dp{D}/{prefill_s{BUCKET}|decode_b{BATCH}}_{COUNTER}/{MODULE}/rank{R}.pt``; beside the
modules, ``{pass}_meta.json`` says of which requests a pass was (``req_ids``), and where its tokens
stand (``positions``). Tensors have tokens and no sequences: those of a prefill are one request's,
or one's behind the other's, and those of a decode step have a row for each request. Padding stands
behind them. In a prefill ranks share the tokens of what stands between a block's parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import HEAD, Site
from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.ground.files import reading
from layerparity.ground.parse import parse_json
from layerparity.record.dump_files import sole
from layerparity.record.engines._requests import (
    ModelPass,
    RequestFiles,
    ServedChunk,
    ServedRequest,
    by_step,
    in_rows,
    requests_of,
)
from layerparity.record.engines.base import Captures, Given, unwrapped
from layerparity.record.tensor_source import SiteFiles

if TYPE_CHECKING:
    import torch

    from layerparity.numbers.rank_parts import Split

TITLE = "what a vLLM Neuron model captured"
_PASS = re.compile(r"(?:prefill_s|decode_b)\d+_\d+", re.ASCII)
_REPLICA = re.compile(r"dp\d+", re.ASCII)
_RANK = re.compile(r"rank(\d+)\.pt", re.ASCII)
# The model that is served, among those that captured; in older releases it has no folder.
_TARGET = "target"


def matches(folder: Path) -> bool:
    """Say whether a folder holds a pass of a model."""
    models = [folder, *(each for each in folder.iterdir() if each.is_dir())]
    replicas = [each for where in models for each in _inside(where, _REPLICA)]
    return any(_inside(each, _PASS) for each in replicas)


def read(given: Given) -> Captures:
    """Return what the served model captured, a row for each request.

    Raises UserError where a pass, a file or a rank is missing, and where the requests are not those
    that the command says were fed.
    """
    passes = _passes(given.folder)
    requests, wrong = requests_of(given.folder, passes)
    rows = in_rows(given.folder, requests, wrong, given.fed())
    passes_of = by_step(rows)
    found: dict[Site, SiteFiles] = {}
    splits: dict[Site, Split] = {}
    ignored = []
    for module in _modules(given.folder, passes):
        site, split = given.site(f"{unwrapped(module)}.out")
        if site is None:
            ignored.append(module)
            continue
        if split is not None:
            splits[site] = split
        for step, chunks in enumerate(passes_of):
            parts = ModuleFiles.of(module, chunks, last=site.path == HEAD)
            found.setdefault(site.at_step(step or None), parts)
    also = tuple(each.folder / f"{each.folder.name}_meta.json" for each in passes)
    notes = _notes(given.folder, requests, wrong, rows, len(passes_of) - 1)
    return Captures(found, len(passes[0].ranks), tuple(ignored), splits, notes, also)


@dataclass(frozen=True)
class ModuleFiles(RequestFiles):
    """What each rank captured of a ``module``."""

    module: str

    @classmethod
    def of(cls, module: str, rows: Sequence[tuple[ServedChunk, ...]], last: bool) -> ModuleFiles:
        """Return what ranks captured of a module, and the files that it lies in."""
        used = {chunk.of.folder: chunk.of for row in rows for chunk in row}
        paths = [_file(each, module, rank) for each in used.values() for rank in each.ranks]
        return cls(tuple(paths), tuple(rows), last, module)

    def of_pass(self, of: ModelPass) -> list[torch.Tensor]:
        """Return what each rank holds of a pass, of all its tokens, [token, ...]."""
        import torch

        parts = [sole(_file(of, self.module, rank)) for rank in of.ranks]
        tokens, own = len(of.positions), parts[0].shape[0] if parts[0].dim() else 0
        alike = all(part.dim() and part.shape[0] == own for part in parts)
        if alike and of.prefill and own * len(parts) == tokens and not self.last:
            # Each rank has its share of the tokens. A head is given all that it is asked of.
            return [torch.cat(parts)] * len(parts)
        if alike and (own == tokens or (self.last and own >= len(of.requests))):
            return parts
        what = f"{own} tokens" if alike else "other numbers of tokens on each rank"
        raise ValueError(f"{of.folder.name} holds {what} of it, in a pass of {tokens}")


def _file(of: ModelPass, module: str, rank: int) -> Path:
    return of.folder / module / f"rank{rank}.pt"


def _inside(folder: Path, name: re.Pattern[str]) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in found if each.is_dir() and name.fullmatch(each.name))


def _passes(folder: Path) -> list[ModelPass]:
    """Return the passes of the served model. Raises UserError where one lacks a file."""
    model = next((e for e in (folder / _TARGET, folder) if _inside(e, _REPLICA)), None)
    if model is None:
        raise UserError(
            f"{folder} holds captures of {', '.join(_others(folder))} alone",
            "capture the model that is served, or name the folder of one model.",
        )
    found = []
    for where in (each for replica in _inside(model, _REPLICA) for each in _inside(replica, _PASS)):
        path = where / f"{where.name}_meta.json"
        cure = "copy the whole folder of each pass, its _meta.json too."
        if not path.is_file():
            raise UserError(f"{path} is missing: it says which tokens the pass was given", cure)
        names, places = _told(path, cure)
        held = {each.name: _ranks_of(each) for each in where.iterdir() if each.is_dir()}
        if not any(held.values()):
            raise UserError(f"{where} holds no module's files", cure)
        ranks = range(max((max(each, default=0) for each in held.values()), default=0) + 1)
        for module, own in held.items():
            for lost in sorted(set(ranks) - own):
                raise UserError(
                    f"{where} holds {module} of other ranks and not of rank {lost}",
                    "copy every rank's files of each pass.",
                )
        prefill = where.name.startswith("prefill")
        found.append(ModelPass(where, prefill, names, places, ranks, frozenset(held)))
    return found


def _told(path: Path, cure: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a pass's requests and positions. Raises UserError where its file does not say them."""
    with reading(path, cure):
        # It may say more, which is not ours to know.
        told = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise ValueError("is no object")
        names: list[str] = decode(list[str], told.get("req_ids"))
        places: list[int] = decode(list[int], told.get("positions"))
    return tuple(names), tuple(places)


def _ranks_of(module: Path) -> set[int]:
    matches = (_RANK.fullmatch(each.name) for each in module.iterdir())
    return {int(match[1]) for match in matches if match}


def _modules(folder: Path, passes: Sequence[ModelPass]) -> list[str]:
    """Return what was captured in every pass, of as many ranks. UserError where a pass differs."""
    first = passes[0]
    for each in passes:
        names = sorted(each.modules ^ first.modules) or ["files of as many ranks"]
        if (each.modules, each.ranks) != (first.modules, first.ranks):
            raise UserError(
                f"{folder}: {first.folder.name} and {each.folder.name} do not both hold {names[0]}",
                "copy every rank's files of each pass.",
            )
    return sorted(first.modules)


def _notes(
    folder: Path,
    requests: Sequence[ServedRequest],
    wrong: Mapping[str, UserError],
    rows: Sequence[ServedRequest],
    steps: int,
) -> tuple[str, ...]:
    """Return what is to be known: which request is which row, and what was left out."""
    notes = []
    if len(requests) > 1:
        notes.append(f"rows are requests {', '.join(each.name for each in rows)}, in this order")
    tokens = {each.name: each.tokens for each in rows}
    left = [each.name for each in requests if each.name not in tokens]
    for each in requests:
        if tokens.get(each.name, each.tokens) != each.tokens:
            had = tokens[each.name]
            notes.append(f"request {each.name} has {had} tokens: what is behind them pads them")
    notes += [f"request {name} is left out: {error.found}" for name, error in wrong.items()]
    if left:
        notes.append(f"requests {', '.join(left)} are no rows of what was fed, and are left out")
    longest = max(len(each.steps) for each in rows)
    if longest > steps:
        notes.append(f"{steps} decode steps are kept, which every request has, of {longest}")
    if (folder / _TARGET).is_dir() and _inside(folder, _REPLICA):
        notes.append(f"what stands beside {_TARGET} is left out")
    if others := _others(folder):
        notes.append(f"captures of other models are left out: {', '.join(others)}")
    return tuple(notes)


def _others(folder: Path) -> list[str]:
    """Return the models beside the one that is served: drafts, towers."""
    found = [each for each in folder.iterdir() if each.is_dir() and _inside(each, _REPLICA)]
    return sorted(each.name for each in found if each.name != _TARGET)
