"""Commands for `tools/faults.py`: processes of their own, which may be made to stop at a moment.

A process is forked from one that has imported everything, so that chance hits a run at work and not
its imports; `real` processes import for themselves, as a user's do.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults_moments import POINTS, Moment, patch, set_clock

ROOT = Path(__file__).resolve().parents[1]
# A command takes seconds; one that takes this long never ends.
LIMIT = 300.0
PRELOADED = (
    "torch",
    "transformers.models.minimax_m2.modeling_minimax_m2",
    "accelerate",
    "mlflow.store.tracking.sqlalchemy_store",
    "layerparity.cli.door",
    "layerparity.making.make",
    "layerparity.making.execute",
    "layerparity.making.reference",
    "layerparity.ports.known.hf",
    "layerparity.making.evaluate",
    "layerparity.backends.gpu.backend",
    "layerparity.search.blocks",
    "layerparity.report.keep",
    "layerparity.judge.conclude",
    "layerparity.tracking.opening",
)


@dataclass(frozen=True)
class Task:
    """What a process does: a command line from a folder, and what befalls it.

    ``stop`` is when it kills itself; ``trace`` gets a line for each call of a point; ``clock`` is
    added to the time, from its second element's call on the third's; ``largest`` is how many bytes
    a file may have.
    """

    words: tuple[str, ...]
    folder: Path
    stop: Moment | None = None
    trace: Path | None = None
    clock: tuple[float, int, float] | None = None
    largest: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    call: Callable[..., None] | None = None


@dataclass(frozen=True)
class Ended:
    """How a process ended (minus a signal's number, None where it hung), and what it said."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def crashed(self) -> bool:
        """Whether it ended with an internal error, or a traceback of any kind."""
        return self.status == 3 or "Traceback (most recent call last)" in self.err

    @property
    def last(self) -> str:
        """The last two lines it said on standard error."""
        return " | ".join(line[:300] for line in self.err.strip().splitlines()[-2:])


class Child:
    """A process at its task."""

    def __init__(self, task: Task, real: bool = False) -> None:
        self._said = [Path(tempfile.mkstemp(dir=task.folder, prefix=".said-")[1]) for _ in range(2)]
        self._began = time.monotonic()
        self._forked: Any = None
        if real:
            with self._said[0].open("wb") as out, self._said[1].open("wb") as err:
                command = [sys.executable, str(ROOT / "run.py"), *task.words]
                told = {**os.environ, **task.environment}
                self._process = subprocess.Popen(
                    command,
                    cwd=task.folder,
                    env=told,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.pid = self._process.pid
        else:
            self._forked = _server().Process(target=carry_out, args=(task, self._said))
            self._forked.start()
            self.pid = int(self._forked.pid)

    def send(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process alone, unless it ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_alive(self) -> bool:
        """Return whether it still works."""
        if self._forked is not None:
            return bool(self._forked.is_alive())
        return self._process.poll() is None

    def wait(self, seconds: float = LIMIT) -> Ended:
        """Wait for its end, which is forced where it takes too long; return how it ended."""
        status: int | None
        if self._forked is not None:
            self._forked.join(seconds)
            status = self._forked.exitcode
        else:
            try:
                status = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
        took = time.monotonic() - self._began
        # Its own children, too, which a killed one leaves.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._forked is not None:
            self._forked.join(10)
            self._forked.close()
        else:
            self._process.wait(10)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self._said)
        for path in self._said:
            path.unlink()
        return Ended(status, out, err, took)


def run(task: Task, real: bool = False) -> Ended:
    """Carry out a task in a process of its own; return how it ended."""
    return Child(task, real).wait()


_SERVERS: list[Any] = []


def _server() -> Any:
    """Return what forks from one process that has imported everything."""
    if not _SERVERS:
        from layerparity.tracking.process import prepare_environment

        os.environ["USE_TORCH_XLA"] = "0"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # A fork has no threads but its own, so there may be none in what it is forked from.
        os.environ["OMP_NUM_THREADS"] = "1"
        prepare_environment(30)
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(list(PRELOADED))
        _SERVERS.append(server)
    return _SERVERS[0]


def carry_out(task: Task, said: list[Path]) -> None:
    """Be the process of a task: end as its command ends."""
    os.setsid()
    for number, path in enumerate(said, start=1):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(task.folder)
    os.environ.update(task.environment)
    tempfile.tempdir = None
    if torch := sys.modules.get("torch"):
        # It makes its threads again, for a fork has none: not two threads at once.
        torch.set_num_threads(torch.get_num_threads())
    _prepare(task)
    if task.call is not None:
        task.call(*task.words)
        return
    from layerparity.cli.door import main

    sys.argv = ["run.py", *task.words]
    sys.exit(int(main()))


def _prepare(task: Task) -> None:
    if task.clock is not None:
        set_clock(*task.clock)
    if task.largest is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (task.largest, hard))
    if task.trace is not None or task.stop is not None:
        counts: Counter[str] = Counter()
        for point in POINTS if task.stop is None else (task.stop.point,):
            patch(point, counts, task.trace, task.stop)
