"""Kill a run at random moments, resume it until it is whole, and hold it against one never killed.

    python tools/kills.py --kills 30 --seed 0 backend=gpu device_map=cpu generate.max_new_tokens=3

Prints a line for each whole run, and ends with 1 if one of them differs in a bit. All it writes is
in a temporary folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What says how a run was made, not what it computed: `resume=true` itself, and how long it took.
_OWN = ("config.yaml", "profile.json")
_LIBRARIES = ("torch", "transformers", "mlflow.store.tracking.sqlalchemy_store")


def command(words: Sequence[str], said: Path, before: Callable[[], object] = lambda: None) -> int:
    """Start a command line in a fork of this process; return its id.

    What it prints is appended to ``said``; ``before`` is called in it first.
    """
    child = os.fork()
    if child:
        return child
    status = 3
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        # What it says is watched.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from layerparity.cli.door import main

        before()
        sys.argv = ["run.py", *words]
        status = int(main())
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(child: int, when: Callable[[], bool] = lambda: False) -> int:
    """Wait for a child, and kill it ``when`` it is time; return its status as a shell has it."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if when():
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


class Clock:
    """Counts from when a command says what its run is fed: before, there is nothing to lose."""

    def __init__(self, said: Path) -> None:
        self._said, self._from = said, said.stat().st_size
        self._began = 0.0

    def seconds(self) -> float:
        """Return how long the run has been computed, 0 before it is."""
        if not self._began and b"\nfed " in self._said.read_bytes()[self._from :]:
            self._began = time.monotonic()
        return time.monotonic() - self._began if self._began else 0.0


def contents(store: Path) -> list[dict[str, str]]:
    """Return the hashes of all that each whole run of a store computed, by file."""
    return [_computed(each.parent) for each in store.glob("artifacts/*/artifacts/manifest.json")]


def _computed(folder: Path) -> dict[str, str]:
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        # A run that is killed once it is finished keeps its journal.
        if path.is_file() and path.name not in _OWN and path.parent.name != ".progress"
    }
    manifest = folder / "manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"] = {k: v for k, v in listed["files"].items() if k not in _OWN}
    found[manifest.name] = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return found


def ready() -> None:
    """Import what every child needs, once, and nothing that starts threads."""
    sys.path.insert(0, str(ROOT / "src"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["USE_TORCH_XLA"] = "0"
    from layerparity.tracking.process import prepare_environment

    prepare_environment(5)
    for library in _LIBRARIES:
        importlib.import_module(library)


def main() -> int:
    """Make runs until so many were killed; return 1 if a resumed one is not what it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", default=["backend=gpu", "device_map=cpu"])
    asked = parser.parse_args()
    ready()
    with tempfile.TemporaryDirectory() as folder:
        return _kill(Path(folder), asked.words, asked.kills, random.Random(asked.seed))  # noqa: S311


def _kill(folder: Path, words: list[str], kills: int, chance: random.Random) -> int:
    os.chdir(folder)
    said = folder / "said"
    said.touch()
    clock = Clock(said)
    child = command([*words, "tracking.folder=whole"], said)
    assert ended(child, partial(_is_time, clock, float("inf"))) == 0, said.read_text()
    whole, (expected,) = clock.seconds(), contents(folder / "whole")
    killed = resumed = wrong = 0
    while killed < kills:
        here, statuses = folder / "killed", []
        while 0 not in statuses:
            line = [*words, "tracking.folder=killed", "resume=true"]
            moment = chance.uniform(0, whole) if killed < kills else float("inf")
            clock = Clock(said)
            statuses.append(ended(command(line, said), partial(_is_time, clock, moment)))
            killed += statuses[-1] == -signal.SIGKILL
            assert statuses[-1] in (0, -signal.SIGKILL), said.read_text()[-2000:]
        again = said.read_text().count("Resuming run")
        same = all(each == expected for each in contents(here))
        wrong += not same
        print(f"{len(statuses) - 1} kills, resumed {again - resumed} times: "
              f"{'equal' if same else 'DIFFERS'}", flush=True)  # fmt: skip
        resumed = again
        shutil.rmtree(here)
    print(f"{killed} kills, {resumed} resumed, {wrong} wrong")
    return int(wrong > 0)


def _is_time(clock: Clock, moment: float) -> bool:
    return clock.seconds() > moment


if __name__ == "__main__":
    sys.exit(main())
