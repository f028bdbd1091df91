"""A process that forks one process a rank: python -m layerparity.ports.ranks.child FOLDER.

FOLDER holds ``start.json``: where to connect, what each rank is made of, and what to import before
the fork. What is imported once is shared by all ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from layerparity.ground.errors import Exit, UserError, said
from layerparity.ports import port_loads
from layerparity.ports.ranks import wire

START = "start.json"
SOCKET = "socket"
# Bytes that the path of a socket may have, on Linux.
_LONGEST = 107


def main(folder: Path) -> int:
    """Import what the ranks need, fork them, and wait until all have ended."""
    start = json.loads((folder / START).read_text(encoding="utf-8"))
    # `python -m` puts the working directory first, where a file may hide what the run imports.
    sys.path[:] = start["path"]
    try:
        if not start["side"].startswith("layerparity."):
            # Before the import, which opens files as well.
            port_loads.watch(start["side"])
        side = imported(start["side"])
        side.prepare(start["keys"])
    except UserError as error:
        return _refuse(folder, start, str(error))
    except Exception as error:
        traceback.print_exc()
        return _refuse(folder, start, said(error))
    # What stands in a buffer at the fork would be written by every rank.
    sys.stdout.flush()
    sys.stderr.flush()
    processes = 1 if start["together"] else start["count"]
    ranks = dict(_forked(folder, start, side, rank) for rank in range(processes))
    worst = 0
    while ranks:
        process, status = os.wait()
        ranks.pop(process, None)
        if status and not worst:
            worst = Exit.INTERNAL
            # The others wait for it in a collective, which has no end.
            for each in ranks:
                os.kill(each, signal.SIGKILL)
    return worst


def imported(target: str) -> Any:
    """Return what a dotted path names."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _refuse(folder: Path, start: Mapping[str, Any], why: str) -> int:
    with _connected(folder, start) as connection:
        wire.send(connection, {"rank": 0, "refused": why}, {})
    return Exit.USER


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """Give the path of a folder's socket, in a form that is short enough for one."""
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    # Through a descriptor the kernel finds the folder, however long its own path is.
    opened = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


def _connected(folder: Path, start: Mapping[str, Any]) -> Connection:
    with address(folder) as path:
        return Client(path, "AF_UNIX", authkey=bytes.fromhex(start["key"]))


def _forked(folder: Path, start: Mapping[str, Any], side: Any, rank: int) -> tuple[int, int]:
    """Start one rank; return its process and its number, in the process that started it."""
    process = os.fork()
    if process:
        return process, rank
    status = Exit.INTERNAL
    try:
        with (folder / f"rank-{rank}.log").open("w") as log:
            # Descriptors, for what compiled code prints before it dies bypasses sys.stderr.
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        with _connected(folder, start) as connection:
            serve(connection, start, side, rank)
        status = Exit.OK
    except (EOFError, ConnectionError):
        # The run has ended, or died: nobody waits for an answer.
        status = Exit.OK
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing of the process that was forked is torn down twice.
        os._exit(status)


def serve(connection: Connection, start: Mapping[str, Any], side: Any, rank: int) -> None:
    """Make one rank, or all where they run together; answer calls until the connection ends."""
    import torch

    from layerparity.ports.ranks.answers import AllAnswers, Answers

    # A forked process has none of the threads that torch counts on.
    torch.set_num_threads(start["threads"])
    # Connections come in any order: the first message says whose this is.
    wire.send(connection, {"rank": rank}, {})
    answers = AllAnswers(side, start) if start["together"] else Answers(side, start, rank)
    while True:
        header, tensors = wire.receive(connection)
        try:
            answer, back = answers.of(header.pop("call"), header, tensors)
        except UserError as error:
            wire.send(connection, {"refused": str(error)}, {})
        except Exception as error:
            traceback.print_exc()
            # If it died of this, the others would be killed before they say what failed in them.
            wire.send(connection, {"failed": said(error)}, {})
        else:
            wire.send(connection, answer, back)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
