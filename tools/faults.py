"""Kill, fill, damage and mislead whatever keeps runs; count what is lost or falsely whole.

    python tools/faults.py --seed 0 --count 100
    make test-faults SEED=0 COUNT=100

COUNT is out of a hundred: 100 are the full numbers of each subject. Each trial follows from the
seed, its subject and its number: --only SUBJECT:NUMBER makes one again. What a trial found,
and the folder of the store it was found in, stands below the table. Nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults_files import damage_checkpoint, damage_run, damage_template, damage_verdict
from faults_held import CRASH, LEFT, LOST, WHOLE, Finding, UnreadableError
from faults_kills import interrupt, kill, write_together
from faults_scene import COMMANDS, Scene
from faults_server import kill_server
from faults_stores import damage_database, fill_disk, set_clock

from layerparity.ground import console, progress

COLUMNS = (LOST, WHOLE, CRASH, LEFT)
Trial = Callable[[Scene, int, random.Random], Iterator[Finding]]


def subjects() -> dict[str, tuple[int, Trial]]:
    """Return the subjects by name: how many trials are all of them, and the trial."""
    from layerparity.settings import config

    known = config.every_key()
    kills: dict[str, tuple[int, Trial]] = {
        f"kill {name}": (100, partial(_kill, name))
        for name in COMMANDS
        if name != "resume" or "resume" in known
    }
    return {
        **kills,
        "writers": (20, write_together),
        "disk": (20, fill_disk),
        "server": (12, kill_server),
        "database": (50, damage_database),
        "bit of a run": (100, damage_run),
        "bit of a verdict": (20, damage_verdict),
        "bit of a checkpoint": (20, damage_checkpoint),
        "bit of a template": (2, damage_template),
        "signals": (50, interrupt),
        "clock": (18, set_clock),
    }


def _kill(name: str, scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    return kill(scene, name, number, maker)


def planned(known: dict[str, int], count: int, only: str) -> dict[str, list[int]]:
    """Return the numbers of the trials of each subject: so many of a hundred, one at least.

    ``only`` names some: subjects, or the beginnings of their names, each with a number or without.
    """
    plan: dict[str, list[int]] = {}
    for each in only.split(","):
        asked, _, one = each.partition(":")
        for name, numbers in known.items():
            if name.startswith(asked):
                many = max(1, round(numbers * min(count, 100) / 100))
                plan.setdefault(name, []).extend([int(one)] if one else range(many))
    return plan


def carried_out(
    folder: Path, seed: int, count: int, only: str
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Carry out the trials; return the rows of the table, and a line for all that was found."""
    known = subjects()
    plan = planned({name: numbers for name, (numbers, _) in known.items()}, count, only)
    counts = {name: Counter[str]() for name in plan}
    spent, said = dict.fromkeys(plan, 0.0), list[str]()
    scene = Scene(folder)
    with progress.shown("trials", sum(map(len, plan.values()))) as bar:
        for name, numbers in plan.items():
            for number in numbers:
                began = time.monotonic()
                maker = random.Random(f"{seed}:{name}:{number}")  # noqa: S311
                try:
                    found = list(known[name][1](scene, number, maker))
                except UnreadableError as error:
                    found = [(LOST, str(error))]
                except Exception:
                    # Hours of others are not lost with it.
                    found = [(LEFT, f"the trial itself broke: {traceback.format_exc()}")]
                # Of one trial each column counts once, however much it shows.
                counts[name].update({"tried", *(column for column, _ in found)})
                spent[name] += time.monotonic() - began
                for column, what in found:
                    said.append(f"seed {seed}: {name}:{number} {column}: {what}")
                    # At once, for hours may follow; and once more below the table.
                    print(said[-1], flush=True)
                bar.step(name)
    rows = [
        (name, *(str(each[column]) for column in ("tried", *COLUMNS)), f"{spent[name]:.0f} s")
        for name, each in counts.items()
    ]
    return rows, said


def main() -> int:
    """Try, print the table; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="of a hundred: 100 are all")
    parser.add_argument("--only", default="", help="SUBJECT or SUBJECT:NUMBER, several with commas")
    parser.add_argument("--folder", type=Path, help="where the stores are made")
    asked = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=asked.folder))
    rows, said = carried_out(folder, asked.seed, asked.count, asked.only)
    console.table("Faults", ("what", "tried", *COLUMNS, "time"), rows)
    print(f"seed {asked.seed}, COUNT {asked.count}, {time.monotonic() - began:.0f} s")
    print(*said, sep="\n")
    if not said:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
