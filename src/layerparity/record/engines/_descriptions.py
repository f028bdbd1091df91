"""What ranks say of what they recorded: descriptions that are whole, and of one run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.files import read_json
from layerparity.record.dump_format import (
    DUMP_FILE,
    KEY,
    PASS_FILE,
    VERSION,
    DumpDescription,
    description_of,
)

AGAIN = "record it again into an empty folder"
_HEAD = re.compile(rf'\s*{{\s*"{KEY}"\s*:\s*(\d+)')


def version_of(path: Path) -> str:
    """Return the version that a description begins with; empty where it is none of ours."""
    with path.open("rb") as file:
        found = _HEAD.match(file.read(256).decode(errors="replace"))
    return found[1] if found else ""


def descriptions(folder: Path) -> list[DumpDescription]:
    """Return the description of each rank, or of rank 0 where nothing else is there.

    Raises UserError.
    """
    dumps: list[DumpDescription] = []
    while not dumps or len(dumps) < dumps[0].ranks:
        rank, path = len(dumps), folder / description_of(len(dumps))
        if not path.is_file():
            if rank == 1 and {*_of_ranks(folder)} == {0}:
                break
            raise UserError(
                f"{folder} holds passes of a recording that has not ended: no {path.name}",
                "wait until the block of each rank is left; if its process died, record again.",
            )
        if (version := version_of(path)) != str(VERSION):
            raise UserError(
                f"{path} is a recording of version {version or 'none'}, and {VERSION} is read here",
                f"{AGAIN}, with this version of layerparity.",
            )
        dumps.append(read_json(path, DumpDescription, AGAIN))
        first, own = _run(dumps[0]), _run(dumps[-1])
        for what in (each for each in first if first[each] != own[each]):
            raise UserError(
                f"{folder}: rank 0 and rank {rank} have other {what}, and are ranks of two runs",
                "record all ranks of one run into an empty folder, and each data-parallel replica "
                "into one of its own (rank=0, ranks=1).",
            )
    if [each.rank for each in dumps] != [*range(len(dumps))] or not dumps[0].passes:
        raise UserError(f"{folder} has no pass, or files of other ranks", f"{AGAIN}.")
    return dumps


def _of_ranks(folder: Path) -> Iterator[int]:
    """Yield the ranks whose files a folder holds."""
    for path in folder.iterdir():
        if found := PASS_FILE.fullmatch(path.name) or DUMP_FILE.fullmatch(path.name):
            yield int(found[1] or 0)


def _run(dump: DumpDescription) -> dict[str, object]:
    """Return what is the same on every rank of a run."""
    return {
        "engines": (dump.engine, dump.engine_version, dump.torch, dump.layerparity),
        "numbers of ranks": dump.ranks,
        "passes": [(each.phase, each.step, each.rows) for each in dump.passes],
        "token ids": [each.ids for each in dump.passes],
        "positions": [each.positions for each in dump.passes],
    }
