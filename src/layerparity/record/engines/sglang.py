"""SGLang's --debug-tensor-dump-output-folder, and vLLM's dump of the same layout.

A rank's folder ``TP{t}_PP{p}_Rank{r}_pid{pid}`` holds ``Pass{N}.pt``, what the modules without
modules in them put out. A pass is written before the model's own output and the logits are there:
these lie in the next one's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.record.dump_files import read_pt
from layerparity.record.engines._served import (
    LOGITS,
    ModuleOutput,
    served_captures,
    served_prompts,
)
from layerparity.record.engines.base import Captures, Given, unwrapped

if TYPE_CHECKING:
    import torch

TITLE = "SGLang's tensor dump"
_RANK = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid\d+", re.ASCII)
_PASS = re.compile(r"Pass(\d+)\.pt", re.ASCII)
# Speculation keeps two models, each in a folder of its own.
_TARGET, _DRAFT = "target", "draft"
_BATCH = "model.forward_batch_info."
_LATE = ("model", LOGITS)
_Pass = dict[str, "torch.Tensor"]


def matches(folder: Path) -> bool:
    """Say whether a folder, or that of its served model, holds a rank's folder."""
    return any(_ranks_in(folder)) or any(_ranks_in(folder / _TARGET))


def read(given: Given) -> Captures:
    """Return what a dump holds of one batch of prompts.

    Raises UserError where a rank or a pass is missing, or lacks a module, and for two runs.
    """
    ranks = _ranks(given.folder)
    passes = {key: _passes(where) for key, where in ranks.items()}
    positions = {number: _positions(ranks[0, 0], number, f) for number, f in passes[0, 0].items()}
    prompts = served_prompts(given, positions)
    outputs = [
        ModuleOutput(ranks[tp, pp] / file, key, _name(key), tensor.shape, step, tp, pp)
        for (tp, pp), files in passes.items()
        for number, step in prompts.steps.items()
        for file, key, tensor in _of_pass(files, number)
    ]
    notes = [f"the {_DRAFT} model is left out"] if any(_ranks_in(given.folder / _DRAFT)) else []
    return served_captures(given, outputs, prompts, notes)


def _of_pass(files: Mapping[int, _Pass], number: int) -> Iterable[tuple[str, str, torch.Tensor]]:
    """Yield what a pass put out: its file, the key and the tensor."""
    for late, file in ((False, number), (True, number + 1)):
        for key, tensor in files.get(file, {}).items():
            if (key.partition("/")[0] in _LATE) == late and _name(key):
                yield f"Pass{file:05d}.pt", key, tensor


def _ranks_in(folder: Path) -> Iterable[tuple[re.Match[str], Path]]:
    """Yield the folders of ranks, with what their names say."""
    for each in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = _RANK.fullmatch(each.name)
        if found is not None and each.is_dir():
            yield found, each


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """Return each rank's folder by its tensor and pipeline ranks. Raises UserError."""
    target = folder / _TARGET if any(_ranks_in(folder / _TARGET)) else folder
    ranks: dict[tuple[int, int], Path] = {}
    for found, path in _ranks_in(target):
        if (key := (int(found[1]), int(found[2]))) in ranks:
            raise UserError(
                f"{target} holds {ranks[key].name} and {path.name}, of two runs, or of "
                "data-parallel replicas",
                "keep the folders of one run, one for each rank; of replicas, those of one.",
            )
        ranks[key] = path
    tps, pps = ({key[axis] for key in ranks} for axis in (0, 1))
    for pp in range(1 + max(pps)):
        for tp in range(1 + max(tps)):
            if (tp, pp) not in ranks:
                raise UserError(f"{target} holds no folder TP{tp}_PP{pp}_...", "copy every rank's.")
    return dict(sorted(ranks.items()))


def _passes(folder: Path) -> dict[int, _Pass]:
    """Return the tensors of each pass, by its number. Raises UserError for a damaged file."""
    named = {path: _PASS.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return {int(found[1]): read_pt(path) for path, found in named.items() if found}


def _positions(folder: Path, number: int, held: _Pass) -> list[int]:
    """Return the positions of a pass's tokens. Raises UserError where it does not say them."""
    places = held.get(f"{_BATCH}positions")
    if places is None:
        raise UserError(
            f"{folder}: Pass{number:05d}.pt does not hold {_BATCH}positions",
            "dump the module named 'model' too, of which the engine keeps what it was fed.",
        )
    listed: list[int] = (places if places.dim() < 2 else places[0]).tolist()
    return listed


def _name(key: str) -> str:
    """Return what a tensor is called here; nothing for what says how a batch lies."""
    module, slash, part = key.partition("/")
    if module.startswith(_BATCH):
        return "input_ids" if module.endswith(".input_ids") else ""
    return f"{unwrapped(module)}.out{slash}{part}"
