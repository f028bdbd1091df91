"""TensorCapture: the files that a compiled NxDI model leaves, and the sites that they are of.

A file is ``captured_tensors_{cte|tkg}_step_{m}_module_{name}_output.pt`` (also ``_outputs``,
``.outputs``, ``_input``), with cte for the prefill and tkg for decode steps; each rank may have a
folder: rank_0, rank0, tp_rank_0, tp0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.files import read_json
from layerparity.record.dump_files import Dumped
from layerparity.record.engines.base import Captures, Given, by_name

TITLE = "what a compiled NxDI model captured"
_FILE = re.compile(
    r"captured_tensors_(?P<phase>cte|ctx|tkg)_step_(?P<step>\d+)_module_(?P<module>[\w.]+?)"
    r"[._](?P<end>in|out)puts?\.pt"
)
# Where a rank may say what it ran with: versions by package, beside its tensors.
VERSIONS = "versions.json"
_RANK = re.compile(r"(?:tp[_-]?)?(?:rank|tp)[_-]?(\d+)", re.ASCII)


def matches(folder: Path) -> bool:
    """Say whether a folder, or one of a rank in it, holds a captured tensor."""
    folders = [folder, *(each for each in folder.iterdir() if each.is_dir())]
    return any(_FILE.fullmatch(each.name) for each in folders for each in each.iterdir())


def read(given: Given) -> Captures:
    """Return what a capture folder holds.

    Raises UserError where a rank, or a file of one, is missing, where files are of two runs, and
    where ranks say that they ran with other versions.
    """
    folder = given.folder
    ranks = _ranks(folder)
    _refuse_other_versions(ranks)
    files = {rank: _files(where) for rank, where in ranks.items()}
    steps = _steps(folder, files[0])
    tensors = []
    for rank, held in files.items():
        if files[0].keys() != held.keys():
            name = sorted(files[0].keys() ^ held.keys())[0]
            raise UserError(
                f"{folder}: rank {rank} and rank 0 do not both hold {'.'.join(map(str, name))}",
                "copy every rank's files of one run.",
            )
        for (phase, step, module, end), path in sorted(held.items()):
            names = (f"{module}.{end}", *([module] if end == "out" else ()))
            tensors.append(Dumped(path, None, names, rank, steps[phase, step]))
    return by_name(given, tensors, {}, what="capture", on_the_right=True)


_Key = tuple[str, int, str, str]


def _ranks(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks; the folder itself where it holds the files. UserError."""
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    matches = {each: _RANK.fullmatch(each.name.lower()) for each in inside}
    ranks = {int(match[1]): each for each, match in matches.items() if match}
    if any(_FILE.fullmatch(each.name) for each in folder.iterdir()):
        if ranks:
            raise UserError(
                f"{folder} holds captured tensors beside folders of ranks",
                "keep one run in a folder: its ranks' folders, or the files of one rank.",
            )
        return {0: folder}
    lost = sorted(set(range(max(ranks, default=0) + 1)) - set(ranks))
    if lost:
        raise UserError(
            f"{folder} holds no folder of rank {lost[0]}",
            "copy every rank's files (rank_0, rank_1, ...).",
        )
    return dict(sorted(ranks.items()))


def _refuse_other_versions(ranks: Mapping[int, Path]) -> None:
    """Raise UserError where what ranks ran with, as they say, is not of one version."""
    files = {rank: folder / VERSIONS for rank, folder in ranks.items()}
    said = {
        rank: read_json(path, dict[str, str], f"write it again, or remove each rank's {VERSIONS}")
        for rank, path in files.items()
        if path.is_file()
    }
    for rank, own in said.items():
        first, theirs = next(iter(said.items()))
        for name in sorted(own.keys() & theirs.keys()):
            if own[name] != theirs[name]:
                raise UserError(
                    f"rank {rank} ran with {name} {own[name]} and rank {first} with "
                    f"{theirs[name]} ({files[rank]})",
                    "run one version on every rank, and capture again.",
                )


def _files(folder: Path) -> dict[_Key, Path]:
    """Return the captured tensors of one rank by phase, step, module and end."""
    found: dict[_Key, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        phase = "tkg" if match["phase"] == "tkg" else "cte"
        module = match["module"].removeprefix("model.")
        key = (phase, int(match["step"]), module, match["end"])
        if key in found:
            raise UserError(
                f"{path} and {found[key].name} are of one module and step",
                "keep the files of one run in a folder.",
            )
        found[key] = path
    return found


def _steps(folder: Path, files: Mapping[_Key, Path]) -> dict[tuple[str, int], int]:
    """Return the decode step of each phase and step, 0 for the prefill. UserError for two runs.

    A capture counts its steps on from the prefill, or anew: what comes first is the first.
    """
    prefills = sorted({step for phase, step, _, _ in files if phase == "cte"})
    decodes = sorted({step for phase, step, _, _ in files if phase == "tkg"})
    if len(prefills) != 1:
        found = f"prefills (cte) of steps {', '.join(map(str, prefills))}" if prefills else "no cte"
        raise UserError(
            f"{folder} holds {found}", "keep the files of one prompt, from its prefill on."
        )
    gaps = (
        [step for step in range(decodes[0], decodes[-1]) if step not in decodes] if decodes else []
    )
    if gaps:
        raise UserError(
            f"{folder} holds tkg steps {decodes[0]} to {decodes[-1]} and no step {gaps[0]}",
            "keep the files of one run, each of its steps.",
        )
    modules = {
        at: {(m, e) for phase, step, m, e in files if (phase, step) == at}
        for at in {(phase, step) for phase, step, _, _ in files if phase == "tkg"}
    }
    for (phase, step), held in sorted(modules.items()):
        first = modules[phase, decodes[0]]
        if held != first:
            module = sorted(held ^ first)[0][0]
            raise UserError(
                f"{folder}: tkg steps {decodes[0]} and {step} do not both hold {module}",
                "keep the files of one run.",
            )
    numbered: dict[tuple[str, int], int] = {("cte", prefills[0]): 0}
    return numbered | {("tkg", step): n for n, step in enumerate(decodes, 1)}
