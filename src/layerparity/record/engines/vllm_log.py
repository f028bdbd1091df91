"""vLLM's intermediate logging: a folder for each step, and in it one for each call of a module.

``{uuid}/step_{n}/{module}[_{call}]/{inputs_0,outputs[_0]}_{device}.pt``; ``module_calls.txt`` lists
the calls. A step ends with the model's forward: the logits lie in the next step's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import progress
from layerparity.ground.errors import UserError
from layerparity.record.dump_files import sole
from layerparity.record.engines._served import (
    LOGITS,
    ModuleOutput,
    served_captures,
    served_prompts,
)
from layerparity.record.engines.base import Captures, Given, unwrapped

if TYPE_CHECKING:
    import torch

TITLE = "vLLM's intermediate log"
_STEP = re.compile(r"step_(\d+)", re.ASCII)
_CALLS = "module_calls.txt"
_FILE = re.compile(r"(in|out)puts(?:_(\w+?))?_(cpu|mps|[a-z]+_\d+)\.pt", re.ASCII)
_LATER_CALL = re.compile(r"(.+)_\d+", re.ASCII)
# What the model, or its first block, is told of where tokens stand, and what it is fed.
_POSITIONS, _IDS = ("model.in/1", "layers.0.in/0"), ("model.in/0", "embed_tokens.in")
# The files of a step: by name, and by the device that each one's rank ran on.
_Step = Mapping[str, Mapping[str, Path]]


def matches(folder: Path) -> bool:
    """Say whether a folder, or one in it, holds a step and the list of its calls."""
    runs = _runs(folder).values()
    return any((step / _CALLS).is_file() for steps in runs for step in steps.values())


def read(given: Given) -> Captures:
    """Return what a log holds of one batch of prompts.

    Raises UserError where nothing says which tokens a step is of, where a step or a rank is missing
    or lacks a module, and for two runs.
    """
    runs = _runs(given.folder)
    if len(runs) != 1:
        raise UserError(f"{given.folder} holds {len(runs)} runs", "give the folder of one of them.")
    found = {number: _files(path) for steps in runs.values() for number, path in steps.items()}
    ranks = _ranks(found)
    prompts = served_prompts(given, dict(_positions(given.folder, found)))
    outputs, files = [], []
    for number, step in prompts.steps.items():
        late = {k: v for k, v in found.get(number + 1, {}).items() if k.startswith(LOGITS)}
        own = {k: v for k, v in found[number].items() if not k.startswith(LOGITS)}
        each = {**own, **late}.items()
        files += [(step, name, *file) for name, held in each for file in held.items()]
    for step, name, device, path in progress.each("files", files):
        tensor, told = sole(path), "input_ids" if name == _IDS[0] else name
        # Other whole numbers are positions.
        if tensor.is_floating_point() or name in _IDS:
            rank = ranks[device]
            outputs.append(ModuleOutput(path, None, told, tensor.shape, step, rank))
    return served_captures(given, outputs, prompts)


def _runs(folder: Path) -> dict[Path, dict[int, Path]]:
    """Return the steps by number of the folder, and of those in it, that hold some."""
    inside = [each for each in (folder, *sorted(folder.iterdir())) if each.is_dir()]
    named = {root: {each: _STEP.fullmatch(each.name) for each in root.iterdir()} for root in inside}
    return {
        root: {int(found[1]): step for step, found in steps.items() if found}
        for root, steps in named.items()
        if any(steps.values())
    }


def _files(step: Path) -> _Step:
    """Return a step's files; of a module that is called again, those of its first call."""
    found: dict[str, dict[str, Path]] = {}
    called = {each.name for each in step.iterdir() if each.is_dir()}
    for module in sorted(called):
        again = _LATER_CALL.fullmatch(module)
        files = {path: _FILE.fullmatch(path.name) for path in sorted((step / module).iterdir())}
        ends = [(path, match.groups()) for path, match in files.items() if match]
        several = {end for _, (end, part, _) in ends if part not in (None, "0")}
        # A block's are pairs, of which one alone is none of its ends.
        pair = re.fullmatch(r"layers\.\d+", unwrapped(module)) is not None
        for path, (end, part, device) in ends if not (again and again[1] in called) else ():
            told = part and (pair or end in several or part != "0")
            name = f"{unwrapped(module)}.{end}{f'/{part}' if told else ''}"
            found.setdefault(name, {})[device] = path
    return found


def _ranks(steps: Mapping[int, _Step]) -> dict[str, int]:
    """Return each device's rank; stages of a pipeline, which share no module, are one."""
    files = [each for held in steps.values() for each in held.values()]
    shared = any(len(each) > 1 for each in files)
    devices = {device for each in files for device in each}
    ordered = sorted(devices, key=lambda each: int((re.findall(r"\d+", each) or ["0"])[0]))
    return {device: rank if shared else 0 for rank, device in enumerate(ordered)}


def _positions(folder: Path, steps: Mapping[int, _Step]) -> Iterable[tuple[int, list[int]]]:
    """Yield each step's number and its tokens' positions. Raises UserError."""
    for number, held in steps.items():
        if all(name.startswith(LOGITS) for name in held):
            continue
        told = next((held[name] for name in _POSITIONS if name in held), None)
        if told is None:
            raise UserError(
                f"{folder}: step_{number} does not say at which positions its tokens stand",
                "log the module 'model' too, which is given them.",
            )
        places: torch.Tensor = sole(next(iter(told.values())))
        yield number, (places if places.dim() < 2 else places[0]).tolist()
