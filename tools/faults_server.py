"""Trials of `tools/faults.py` with a real tracking server, which is killed and started again."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from faults_child import Child
from faults_held import LOST, Finding, changes
from faults_scene import COMMANDS, Scene, of_command


class Server:
    """A real tracking server on loopback, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.address = folder, f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        from layerparity.tracking.process import QUIET
        from layerparity.tracking.server import answers

        told = {
            "--backend-store-uri": f"sqlite:///{self.folder}/mlflow.db",
            "--artifacts-destination": str(self.folder / "artifacts"),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
        }
        words = [word for pair in told.items() for word in pair]
        said = (self.folder / "server.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words],
            env={**os.environ, **QUIET},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not answers(self.address):
            if time.monotonic() > deadline or self._process.poll() is not None:
                said.seek(0)
                raise RuntimeError(f"the server does not start at {self.address}: {said.read()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill it and its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def kill_server(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Kill a server, or its client, on the way; start it again; yield what is lost.

    The server is back while the command runs, or when that has ended.
    """
    place, course = scene.fresh(), scene.course("golden")
    # The server's store is made as ours are: by itself it would take seconds.
    place.run(("job=compare", "tracking.folder=server"))
    server = Server(place.folder / "server")
    there = ("tracking=server", f"tracking.uri={server.address}", "tracking.experiment=remote")
    what = ("the server, back at once", "the server, back later", "the client")[number % 3]
    try:
        child = Child(place.task((*COMMANDS["golden"], *there, "tracking.timeout_s=5")))
        time.sleep(maker.random() * 1.5 * course.ended.seconds)
        if what == "the client":
            child.send()
        else:
            server.kill()
        if what == "the server, back at once":
            server.start()
        ended = child.wait()
        if what == "the server, back later":
            server.start()
        synced = place.run(("job=sync", *there))
        found = [
            *of_command(ended, what, (0, 2, -signal.SIGKILL)),
            *of_command(synced, "job=sync", (0,), LOST),
        ]
        after = place.held(server.address)
        whole = ended.status == 0 or "the run is whole" in ended.err
        if whole and [each.status for each in after] != ["FINISHED"]:
            found.append((LOST, "the run was said to be whole, and is not finished"))
        found += [*changes([], after, course.right), *place.leftovers()]
        yield from place.told(found, what)
    finally:
        server.kill()
