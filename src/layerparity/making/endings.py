"""How the jobs of a command ended: in memory, or in a sweep's folder where others run its parts.

A launcher's workers are other processes, and may be on other nodes: they share no memory and no
``/tmp`` with the command, but the store, and so the sweep's folder beside it. Each part leaves one
small file there, whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig

from layerparity.ground.errors import Exit
from layerparity.ground.files import reading, write_text
from layerparity.ground.parse import parse_json

# The folder where parts that other processes run leave their endings; they inherit it.
VARIABLE = "LAYERPARITY_ENDINGS"
_SEVERITY = (
    Exit.OK,
    Exit.INCONCLUSIVE,
    Exit.FAILED,
    Exit.NOT_READY,
    Exit.USER,
    Exit.INTERNAL,
)


class JobEnding(NamedTuple):
    """How one job ended: its exit status, its words as a part of a sweep, and why."""

    exit: Exit
    part: str
    why: str


_here: list[JobEnding] = []
# The words of each part that other processes run, by its number.
_awaited: list[str] = []


def begin() -> None:
    """Forget the jobs of another command, also of the one that started this process."""
    os.environ.pop(VARIABLE, None)
    _here.clear()
    _awaited.clear()


def await_parts(folder: Path, parts: list[str]) -> None:
    """Expect other processes to leave the endings of these parts in the sweep's folder."""
    # A sweep's folder may be given, and hold what an earlier sweep left.
    os.environ[VARIABLE] = str(folder.absolute() / f".endings-{uuid.uuid4().hex[:12]}")
    _awaited[:] = parts


def folder_of_others() -> Path | None:
    """Return the folder that this process shares with others that run parts; None if it is alone.

    The command that waits for them runs none itself, unless its launcher uses no other process.
    """
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder is not None and not _awaited else None


def leave(ending: JobEnding) -> None:
    """Keep how this job ended. Raises OSError where the sweep's folder cannot be written."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        _here.append(ending)
        return
    number = HydraConfig.get().job.num
    write_text(Path(folder) / f"{number}.json", json.dumps(ending._asdict()))


def all_endings() -> list[JobEnding]:
    """Return the endings known so far. Raises UserError for a file that cannot be read."""
    left = [_read(number) for number in range(len(_awaited))]
    return _here + [ending for ending in left if ending is not None]


def ending_of(part: str) -> JobEnding | None:
    """Return how another part of the sweep ended, by its words; None while it has not.

    Raises UserError for a file that cannot be read.
    """
    folder = folder_of_others()
    numbers = [] if folder is None else [int(each.stem) for each in folder.glob("*.json")]
    ended = (_read(number) for number in numbers)
    return next((each for each in ended if each is not None and each.part == part), None)


def silent_parts() -> list[str]:
    """Return the words of the parts that other processes were to run, and that left no word."""
    return [words for number, words in enumerate(_awaited) if _read(number) is None]


def gravest() -> Exit:
    """Return the gravest exit status of all jobs: that of a part without a word is the user's."""
    exits = [ending.exit for ending in all_endings()]
    return max([*exits, *(Exit.USER for _ in silent_parts())], key=_SEVERITY.index, default=Exit.OK)


def remove() -> None:
    """Remove what the parts of this command's sweep left."""
    folder = os.environ.pop(VARIABLE, None)
    if _awaited and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _read(number: int) -> JobEnding | None:
    path = Path(os.environ[VARIABLE]) / f"{number}.json"
    if not path.exists():
        return None
    with reading(path, "run the sweep again with reuse=true"):
        kept = parse_json(path.read_text(encoding="utf-8"))
        return JobEnding(Exit(kept["exit"]), str(kept["part"]), str(kept["why"]))
