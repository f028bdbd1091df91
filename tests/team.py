"""A team's store: PostgreSQL, an S3 server (moto's) and an MLflow server in front of them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from stores import free_port

from layerparity.machine import owner
from layerparity.tracking.process import QUIET

INSTALL = "apt-get install postgresql; pip install 'layerparity[team,dev]'"
BUCKET = "runs"
# None of them may ever stand in what a run keeps or says.
SECRETS = {"postgres": "pg-Secret-7431", "key": "AKIATEAM20417", "s3": "s3-Secret-90218"}
_PACKAGES = ("psycopg", "boto3", "moto")
_USER = "postgres"
_START_SECONDS = 120
_STOP_SECONDS = 20


def _postgres() -> Path | None:
    """Return the folder of PostgreSQL's programs: Debian keeps the server's off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def missing() -> str:
    """Return what is not installed, with the line that installs it; empty where all is there."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    absent += [] if _postgres() else ["postgres"]
    # It refuses to be root, and Debian's package brings a user for it.
    users = {each.pw_name for each in pwd.getpwall()}
    absent += ["the user postgres"] if os.geteuid() == 0 and _USER not in users else []
    return f"{', '.join(absent)} not found: {INSTALL}" if absent else ""


class Team:
    """The three servers, each on a port of 127.0.0.1, in a folder that goes with them.

    ``endpoint`` is the S3 server's address, ``address`` that of MLflow's.
    """

    def __init__(self) -> None:
        # Those of tests that were killed; servers die with the process that started them.
        owner.remove_abandoned(Path("/tmp"))
        # A folder of pytest's is closed to PostgreSQL's own user, who must not be root.
        self.folder = Path(tempfile.mkdtemp(prefix=owner.prefix("team"), dir="/tmp"))
        self.folder.chmod(0o711)
        self.ports = {name: free_port() for name in ("postgres", "s3", "mlflow")}
        self.address = f"http://127.0.0.1:{self.ports['mlflow']}"
        self.endpoint = f"http://127.0.0.1:{self.ports['s3']}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def database(self) -> str:
        """The backend store's address, with the password that MLflow's server is given."""
        where = f"127.0.0.1:{self.ports['postgres']}/mlflow"
        return f"postgresql://lp:{SECRETS['postgres']}@{where}"

    @property
    def credentials(self) -> dict[str, str]:
        """The environment that only the tracking server has."""
        return {
            "AWS_ACCESS_KEY_ID": SECRETS["key"],
            "AWS_SECRET_ACCESS_KEY": SECRETS["s3"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "MLFLOW_S3_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start all three, empty."""
        self.start_postgres()
        self.start_s3()
        self.start_mlflow()

    def start_s3(self, **environment: str) -> None:
        """Start the S3 server with an empty bucket, and these variables."""
        command = [sys.executable, "-m", "moto.server", "-p", str(self.ports["s3"])]
        self.launch("s3", command, env={**os.environ, **environment})
        self.await_port("s3")
        self.s3().create_bucket(Bucket=BUCKET)

    def start_postgres(self) -> None:
        """Start PostgreSQL with an empty database."""
        import psycopg

        bin_, data = _postgres(), self.folder / "pg"
        password = self.folder / "password"
        password.write_text(SECRETS["postgres"])
        data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            shutil.chown(data, _USER)
            shutil.chown(password, _USER)
        words = ["--auth=scram-sha-256", "--username=lp", f"--pwfile={password}", "--no-sync"]
        words += ["--locale=C", "--encoding=UTF8", f"--pgdata={data}"]
        subprocess.run([f"{bin_}/initdb", *words], check=True, capture_output=True, **_apart())
        words = ["-h", "127.0.0.1", "-p", str(self.ports["postgres"]), "-k", str(data)]
        # Not a disk's worth of safety: the folder goes with the test.
        words += ["-D", str(data), "-F"]
        self.launch("postgres", [f"{bin_}/postgres", *words], **_apart(), preexec_fn=_die_with_us)
        self.await_port("postgres")
        address = self.database.replace("/mlflow", "/postgres")
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with psycopg.connect(address, autocommit=True) as link:
                    link.execute("CREATE DATABASE mlflow")
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, self.log("postgres")
                time.sleep(0.2)

    def start_mlflow(self, **environment: str) -> None:
        """Start the tracking server, with these variables in place of its own."""
        # As docs/how-to/tracking.md has it: without the driver's name it is SQLAlchemy's choice.
        store = self.database.replace("postgresql:", "postgresql+psycopg:")
        words = ["--backend-store-uri", store, "--artifacts-destination", f"s3://{BUCKET}"]
        words += ["--host", "127.0.0.1", "--port", str(self.ports["mlflow"]), "--workers", "1"]
        command = [sys.executable, "-m", "mlflow", "server", *words]
        given = {**os.environ, **QUIET, **self.credentials, **environment}
        self.launch("mlflow", command, env=given)
        deadline = time.monotonic() + _START_SECONDS
        while self.processes["mlflow"].poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.log("mlflow"))

    def s3(self):
        """Return a client of the S3 server."""
        import boto3

        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
        keys = ("aws_access_key_id", "aws_secret_access_key", "region_name")
        given = dict(zip(keys, (self.credentials[name] for name in names), strict=True))
        return boto3.client("s3", endpoint_url=self.endpoint, **given)

    def requests(self) -> list[str]:
        """Return the lines of the S3 server's log, one a request."""
        return [line for line in self.log("s3").splitlines() if " HTTP/1.1" in line]

    def launch(self, name: str, command: list[str], **changes) -> None:
        """Start a server that ends when this process does, however that ends."""
        if "preexec_fn" not in changes:
            command = [sys.executable, "-m", "layerparity.tracking.guard", *command]
        with (self.folder / f"{name}.log").open("ab") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            self.processes[name] = subprocess.Popen(
                command, start_new_session=True, cwd=self.folder, **pipes, **changes
            )

    def await_port(self, name: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while self.processes[name].poll() is None and time.monotonic() < deadline:
            if listens(self.ports[name]):
                return
            time.sleep(0.1)
        raise AssertionError(self.log(name))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """End a server and all of its processes at once, as a machine that goes away does."""
        process = self.processes.pop(name, None)
        if process is not None:
            # PostgreSQL's own processes share memory, which only an orderly end gives back.
            number = signal.SIGINT if name == "postgres" else signal.SIGKILL
            os.killpg(process.pid, number)
            process.wait(_STOP_SECONDS)
            process.stdin.close()
            # What the guard started may live a moment longer than the guard.
            deadline = time.monotonic() + _STOP_SECONDS
            while listens(self.ports[name]):
                assert time.monotonic() < deadline, name
                time.sleep(0.1)

    def close(self) -> None:
        for name in ("mlflow", "s3", "postgres"):
            self.kill(name)
        shutil.rmtree(self.folder)


def listens(port: int) -> bool:
    """Return whether a server listens on a port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


def _die_with_us() -> None:
    """Let the kernel end this child, PostgreSQL in order, with its parent (prctl PR_SET_PDEATHSIG).

    The guard cannot: PostgreSQL's own user may have no right to read this Python.
    """
    ctypes.CDLL(None).prctl(1, int(signal.SIGINT))


def _apart() -> dict[str, object]:
    """Return what makes a child another user where this is root: PostgreSQL refuses to be root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
