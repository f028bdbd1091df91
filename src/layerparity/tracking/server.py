"""The MLflow UI of the embedded store as a child process: started, awaited, ended as a group."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import psutil

from layerparity.ground.errors import UserError
from layerparity.ground.files import write_text
from layerparity.settings.tracking import UI_FILE, TrackingConfig, read_config
from layerparity.tracking import database
from layerparity.tracking.opening import open_store
from layerparity.tracking.process import QUIET

LOOPBACK = "127.0.0.1"
START_SECONDS = 120
STOP_SECONDS = 10
# What it says of itself whenever it starts, advice for other uses included.
_USUAL = re.compile(r"\[MLflow\]|.*\bINFO\b")


@dataclass
class Server:
    """A running UI: its address and its process, whose output goes to ``log``.

    ``runs`` is the address of the page that lists the runs.
    """

    address: str
    process: subprocess.Popen[bytes]
    log: IO[str]
    runs: str = ""

    def wait(self) -> None:
        """Wait for ever. Raises UserError with its last words if the server ends by itself."""
        self.process.wait()
        raise UserError(f"The MLflow UI ended by itself: {self.last_words()}")

    def last_words(self) -> str:
        """Return the last line the server wrote that a server which starts does not write."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip() and not _USUAL.match(line)]
        return lines[-1] if lines else "it said nothing."


@contextmanager
def serve(raw: object, port: int) -> Iterator[str]:
    """Serve the embedded store on loopback for a block; yield the address once it answers."""
    with running(read_config(raw), port, LOOPBACK) as server:
        yield server.address


@contextmanager
def running(config: TrackingConfig, port: int, host: str) -> Iterator[Server]:
    """Yield the UI of the embedded store, answering; end its whole process group after the block.

    Raises UserError where the port is taken or not allowed, the store is not there, or the server
    does not start.
    """
    check_port(host, port)
    if not config.root.is_dir():
        raise UserError(
            f"There are no runs in {config.root}, which is not there",
            "tracking.folder=FOLDER names another store; the first run makes one.",
        )
    if not (config.root / database.FILE_NAME).exists():
        open_store(config)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        server = Server(address, _launch(config, host, port, log), log)
        try:
            # Imports what the server imports, at the same time.
            store = open_store(config)
            _await(server, host, port)
            # From now on links to the runs lead here.
            write_text(config.root / UI_FILE, f"{address}\n")
            server.runs = store.runs_url
            yield server
        finally:
            _stop(server.process)
            if server.process.stdin:
                server.process.stdin.close()


def check_port(host: str, port: int) -> None:
    """Raise UserError unless a server may listen on this port now."""
    cure = f"choose another with job.port={port + 1 if 1023 < port < 65535 else 5001}"
    if not 0 < port < 65536:
        raise UserError(f"There is no port {port}", f"{cure}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does it: a port whose last connections linger may be used again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "is in use" if taken else f"cannot be used ({error.strerror})"
            raise UserError(f"Port {port} on {host} {reason}", f"{cure}.") from error


def _launch(config: TrackingConfig, host: str, port: int, log: IO[str]) -> subprocess.Popen[bytes]:
    arguments = {
        "--backend-store-uri": database.database_uri(config.root),
        # For runs that others log through this server; ours say themselves where they lie.
        "--artifacts-destination": str(config.root / database.ARTIFACTS),
        "--host": host,
        "--port": str(port),
        # More than one worker makes each request slower: the work is sqlite's.
        "--workers": "1",
    }
    guarded = [sys.executable, "-m", "layerparity.tracking.guard"]
    command = [*guarded, sys.executable, "-m", "mlflow", "server"]
    for pair in arguments.items():
        command.extend(pair)
    return subprocess.Popen(
        command,
        # The guard waits for its end, which comes with ours.
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        # What it reports is only shown if it fails to start.
        env={**os.environ, **QUIET, "MLFLOW_LOGGING_LEVEL": "INFO"},
        # A group of its own: Ctrl-C reaches us alone, and we end all of its processes.
        start_new_session=True,
    )


def _await(server: Server, host: str, port: int) -> None:
    """Wait until the server answers. Raises UserError where it ends first, or never does."""
    deadline = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        if answers(server.address) and _listens(server.process, port):
            return
        time.sleep(0.2)
    if server.process.poll() is None:
        raise UserError(
            f"The MLflow UI did not answer within {START_SECONDS} s",
            "it may still be starting: wait until the machine and its disk are less busy, and run "
            "the command again.",
        )
    # Another one may have taken the port while this one started.
    check_port(host, port)
    raise UserError(f"The MLflow UI did not start: {server.last_words()}")


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Say whether it is this process, or one that it started, to which a port belongs."""
    try:
        top = psutil.Process(process.pid)
        return any(
            each.status == psutil.CONN_LISTEN and each.laddr.port == port
            for one in (top, *top.children(recursive=True))
            for each in one.net_connections("tcp")
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        # Where that may not be seen, who answers is believed.
        return True


def answers(address: str) -> bool:
    """Return whether an MLflow server answers at an address."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as reply:  # noqa: S310
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, by force if they take too long."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=STOP_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
