"""Plant small faults in the source, one at a time, and see that the nearest tests notice.

    python tools/mutants.py                  # all of tests/mutants, a table
    python tools/mutants.py judge run/gate   # those whose names begin so

tests/mutants/ROOM/NAME.patch says, above its diff, what goes wrong and which file of tests has to
notice (``Caught by: tests/test_NAME.py``). Faults go into copies of the tree; each file of tests
first has to pass on a copy without any. A fault that none notices ends with 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from layerparity.ground import console, progress

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "mutants"
# Seconds that a file of tests may take to notice, and to pass where there is nothing to notice.
NOTICE, PASS = 30, 300
_CAUGHT_BY = re.compile(r"^Caught by: (tests/\S+\.py)$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One small fault: its name (``room/what``), its patch, and the tests that have to notice."""

    name: str
    patch: Path
    tests: str

    @property
    def room(self) -> str:
        """The room of the house that it is planted in."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Ended:
    """How a file of tests ended: pytest's exit status (None: it took too long), and seconds."""

    status: int | None
    seconds: float
    said: str


def mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Return the mutants of a folder by name. Raise ValueError for a patch that names no tests."""
    found = []
    for patch in sorted(folder.glob("*/*.patch")):
        name = f"{patch.parent.name}/{patch.stem}"
        named = _CAUGHT_BY.search(patch.read_text())
        if named is None:
            raise ValueError(f"{name} lacks its line 'Caught by: tests/test_NAME.py'")
        found.append(Mutant(name, patch, named[1]))
    return found


def copied(to: Path) -> Path:
    """Copy what git tracks here, and what it would, into a new folder; return it."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


@contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Plant a mutant in a copy of the tree for a block. Raise ValueError if it fits nowhere."""
    _apply(mutant, tree)
    try:
        yield
    finally:
        _apply(mutant, tree, "--reverse")


def _apply(mutant: Mutant, tree: Path, *options: str) -> None:
    # A folder above the copy that is a repository would have git look there.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    words = ["git", "apply", *options, str(mutant.patch)]
    ended = subprocess.run(words, cwd=tree, env=alone, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError(f"{mutant.name} does not fit the source any more: {ended.stderr.strip()}")


def tried(tests: str, tree: Path, limit: float) -> Ended:
    """Run a file of tests in a copy of the tree, up to its first failure."""
    # Bytecode is told from that of before by its second and size alone, which a fault may keep.
    kept = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **kept}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", tests]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            words,
            cwd=tree,
            env=environment,
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(None, time.monotonic() - began, "")
    return Ended(ended.returncode, time.monotonic() - began, ended.stdout)


def main(words: Sequence[str]) -> int:
    """Plant what the command line asks for, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="Plant small faults; see that tests notice.")
    parser.add_argument("names", nargs="*", help="only mutants whose names begin so")
    parser.add_argument("--workers", type=int, default=2, help="copies that are tried at a time")
    asked = parser.parse_args(words)
    chosen = [
        each
        for each in mutants()
        if not asked.names or any(each.name.startswith(name) for name in asked.names)
    ]
    if not chosen:
        console.complain(f"no mutant's name begins with {' or '.join(asked.names)}")
        return 2
    with tempfile.TemporaryDirectory() as base:
        trees = [copied(Path(base) / str(number)) for number in range(asked.workers)]
        files = sorted({each.tests for each in chosen})
        clean = _each(files, trees, lambda file, tree: tried(file, tree, PASS), "without a fault")
        failing = {file: end for file, end in zip(files, clean, strict=True) if end.status != 0}
        for file, end in failing.items():
            console.complain(f"{file} does not pass without a fault:\n{end.said}")
        ends = _each(chosen, trees, _try_one, "with a fault")
    rows = [
        (each.name, each.tests, _outcome(each, end, failing), f"{end.seconds:.1f}")
        for each, end in zip(chosen, ends, strict=True)
    ]
    console.table("Faults planted one at a time", ("fault", "tests", "outcome", "seconds"), rows)
    caught = sum(outcome == "caught" for _, _, outcome, _ in rows)
    console.say(f"{caught} of {len(rows)} caught within {NOTICE} s")
    return int(caught < len(rows))


def _try_one(mutant: Mutant, tree: Path) -> Ended:
    with planted(mutant, tree):
        return tried(mutant.tests, tree, NOTICE)


def _outcome(mutant: Mutant, end: Ended, failing: dict[str, Ended]) -> str:
    if mutant.tests in failing:
        return "not known"
    if end.status is None:
        return "too late"
    # Whatever ends pytest but a failed test (a missing file, an error of its own) notices nothing.
    return {0: "NOT CAUGHT", 1: "caught"}.get(end.status, f"pytest ended with {end.status}")


def _each(
    jobs: Sequence[Any], trees: Sequence[Path], work: Callable[[Any, Path], Ended], title: str
) -> list[Ended]:
    """Do each job in a copy that no other one uses meanwhile; return their ends in order."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(job: Any) -> Ended:
        tree = free.get()
        try:
            return work(job, tree)
        finally:
            free.put(tree)

    ends = []
    with ThreadPoolExecutor(len(trees)) as pool, progress.shown(title, len(jobs)) as done:
        for job, end in zip(jobs, pool.map(one, jobs), strict=True):
            ends.append(end)
            done.step(getattr(job, "name", job))
    return ends


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
