"""The rank processes of one run: started together, called in lock step, ended together."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import PortError, UserError
from layerparity.machine import owner
from layerparity.ports.ranks import wire
from layerparity.ports.ranks.answers import Answer, apart
from layerparity.ports.ranks.child import START, address
from layerparity.ports.ranks.libraries import refuse_apart

if TYPE_CHECKING:
    import torch

_CHILD = "layerparity.ports.ranks.child"
# Seconds between two looks at whether the processes still live; and how long the ranks may take to
# fail one after the other, once the first one has.
_LOOK_S, _GRACE_S = 1.0, 10.0
# Seconds in which ranks that were told to end may do so.
_END_S = 5.0


class RankGroup:
    """``count`` rank processes on this machine. Messages go through a socket in a private folder.

    ``start`` is what each rank is made of: ``side`` (a dotted path of a `RankSide`), ``keys``,
    ``checkpoint``, ``dtype`` and ``wanted``; ``together`` says that all ranks are one process.
    """

    def __init__(self, start: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._start = {"together": False, **start}
        self.count: int = 1 if self._start["together"] else start["count"]
        self._environment = dict(environment)
        self._stack = ExitStack()
        self._connections: list[Connection] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def open(self) -> None:
        """Start the processes and wait until all of them are there, with the same libraries.

        Raises UserError if not; nothing is left of them then.
        """
        self._folder = Path(self._stack.enter_context(owner.temporary()))
        key = secrets.token_bytes(32)
        path = self._stack.enter_context(address(self._folder))
        listener = self._stack.enter_context(Listener(path, "AF_UNIX", self.count, authkey=key))
        # An empty entry means the working directory of the moment, so it is written out.
        here = [each or str(Path.cwd()) for each in sys.path]
        start = {
            **self._start,
            "key": key.hex(),
            "path": here,
            # Ranks meet at a file: a port may be taken by another run on this machine.
            "rendezvous": str(self._folder / "ranks"),
        }
        file = self._folder / START
        # It holds the key of the socket, so it is private before anything is in it.
        file.touch(mode=0o600)
        file.write_text(json.dumps(start), encoding="utf-8")
        with (self._folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(self._folder)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(here), **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A terminal's Ctrl-C is for this process, which ends them all.
                process_group=0,
            )
        try:
            self._accept(listener)
            # Before they join each other: collectives of two versions may wait for ever.
            answers = self._called("libraries", {}, {})
            refuse_apart([answer["libraries"] for answer, _ in answers])
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: Listener) -> None:
        """Take one connection a rank, in the order of ranks."""
        # Listener.accept waits for ever; its socket tells when it would not.
        waiting = listener._listener._socket  # type: ignore[attr-defined]
        ranks: dict[int, Connection] = {}
        while len(ranks) < self.count:
            if not wait([waiting], timeout=_LOOK_S):
                self._refuse_dead("while they started")
                continue
            connection = listener.accept()
            header, _ = wire.receive(connection)
            if "refused" in header:
                raise UserError(header["refused"])
            ranks[header["rank"]] = connection
        self._connections = [ranks[rank] for rank in sorted(ranks)]

    def call(
        self, method: str, tensors: Mapping[str, torch.Tensor] | None = None, **header: Any
    ) -> list[Answer]:
        """Call a method on every rank and return their answers, in the order of ranks.

        Raises UserError with what the first rank that failed says; the group is closed then.
        """
        if not self._connections:
            raise PortError(
                f"The {self.count} rank processes ended when one of them failed before",
                "run again without what failed.",
            )
        try:
            return self._called(method, tensors or {}, header)
        except BaseException:
            # Answers that are still due would be taken for those of the next call.
            self.close()
            raise

    def _called(
        self, method: str, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
    ) -> list[Answer]:
        # All are told before one is waited for: in a collective each waits for the others.
        for rank, connection in enumerate(self._connections):
            try:
                wire.send(connection, {"call": method, **header}, tensors)
            except OSError:
                self._lost(rank, method)
        answers: dict[int, Answer] = {}
        failed: dict[int, str] = {}
        until = float("inf")
        while len(answers) + len(failed) < self.count and time.monotonic() < until:
            due = {
                each: rank
                for rank, each in enumerate(self._connections)
                if rank not in answers and rank not in failed
            }
            for ready in wait(list(due), timeout=_LOOK_S):
                assert isinstance(ready, Connection)
                rank = due[ready]
                try:
                    answer = wire.receive(ready)
                except (EOFError, OSError):
                    self._lost(rank, method)
                if "refused" in answer[0]:
                    raise UserError(answer[0]["refused"])
                if "failed" in answer[0]:
                    failed[rank] = answer[0]["failed"]
                    # Others may wait for this one in a collective, and never answer.
                    until = min(until, time.monotonic() + _GRACE_S)
                else:
                    answers[rank] = answer
        if failed:
            rank = min(failed)
            stage = f" {header['stage']}" if "stage" in header else ""
            raise PortError(
                f"rank {rank} of {self.count} {failed[rank]} in {method}{stage}{self._said(rank)}"
            )
        return [each for rank in range(self.count) for each in apart(answers[rank])]

    def _lost(self, rank: int, method: str) -> None:
        raise PortError(
            f"rank {rank} of {self.count} died in {method}, and the others were ended"
            f"{self._said(rank)}",
            "look whether memory ran out; fewer ranks (tp_degree) or a smaller scope need less.",
        )

    def _refuse_dead(self, when: str) -> None:
        """Raise UserError where the process that starts the ranks has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise UserError(f"The {self.count} rank processes ended {when}{self._said(None)}")

    def _said(self, rank: int | None) -> str:
        """Return the last line that a rank, or the process that starts them, has printed."""
        names = ["start.log"] if rank is None else [f"rank-{rank}.log", "start.log"]
        for name in names:
            file = self._folder / name
            text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return f" (its last line: {lines[-1][:300]})"
        return ""

    def close(self) -> None:
        """End every process and remove the folder; safe to call twice."""
        # A rank ends by itself when its connection does.
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._process is not None:
            ended(self._process, _END_S)
            self._process = None
        self._stack.close()


def ended(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait until a process and its group have ended; after ``patience`` seconds end them."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()
    # Ranks that it forked may live on after it.
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
