"""Python processes that begin with torch, transformers and MLflow imported, for tests.

What a test starts with ``sys.executable`` pays seconds of imports before its first line. `install`
has ``subprocess`` ask a process that has them, the nursery, for a fork of itself instead: a child
of the test's own process, with the words, folder, environment, streams and session that it would
have had. Where a fork would not be the same, a fresh interpreter is started as ever: with flags of
the interpreter, with other variables that a library reads when it is imported, where a module hides
an imported one or code looks at its own process, in a test marked ``fresh_interpreter``, and for
what a child itself starts.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# What most children import, and nothing of layerparity: a child may be a copy of it.
IMPORTED = (
    "torch.export",
    # What torch.compile and torch_xla import.
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "transformers.models.minimax_m2.modeling_minimax_m2",
    "transformers.models.llama.modeling_llama",
    "mlflow.store.tracking.sqlalchemy_store",
    "hydra.main",
)
# Variables that the interpreter or a library reads once, when it begins.
READ_AT_IMPORT = (
    *("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "GOMP_", "OPENBLAS", "ATEN_", "ONEDNN", "DNNL"),
    *("NUMBA", "TORCH", "HF_", "HUGGINGFACE", "TRANSFORMERS_", "USE_", "CUDA"),
    *("LC_", "LANG", "MALLOC_", "TOKENIZERS", "HOME", "XDG_", "ACCELERATE"),
)
# Not on purpose; the last is one that torch writes into a folder of its own.
_NEVER_HIDDEN = {*sys.stdlib_module_names, "__main__", "_remote_module_non_scriptable"}
# What layerparity has MLflow read at its import: where that is unset, it is set as here.
MLFLOW = {"DISABLE_TELEMETRY": "true", "LOGGING_LEVEL": "CRITICAL"}
# Code that asks what its own process has imported, or how much it took.
LOOKS_AT_ITSELF = ("sys.modules", "import gc", "rlimit", "rusage")
_PR_SET_CHILD_SUBREAPER = 36
# A request and its answer; the environment is most of it.
_LONGEST = 1 << 20
_ORDINARY = subprocess.Popen
# What ``Popen._execute_child`` is given, in order.
_EXECUTE_CHILD = (*inspect.signature(_ORDINARY._execute_child).parameters,)[1:]


class Nursery:
    """A process that has imported what most children need, and forks; begun when first asked."""

    def __init__(self) -> None:
        # That it begins with, and why the last child was none of its forks.
        self.environment: dict[str, str] = {}
        self.refused = ""
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, request: dict[str, Any], streams: list[int]) -> int | None:
        """Return the process number of a new child of this process, None where none can be had."""
        if self._line is None:
            self._begin()
        assert self._line is not None
        # An orphan goes to its nearest ancestor that asks for it. Only now: later ones are init's.
        _reap_orphans(True)
        try:
            socket.send_fds(self._line, [json.dumps(request).encode()], streams)
            answer = json.loads(self._line.recv(_LONGEST))
        finally:
            _reap_orphans(False)
        self.refused = answer.get("why", "")
        return answer["process"]

    def _begin(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._line, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        words = [sys.executable, __file__, str(theirs.fileno())]
        self.environment = dict(os.environ)
        # Streams that cannot be sought: what Python learns of them at its beginning fits a pipe.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = _ORDINARY(
            words, pass_fds=[theirs.fileno()], stderr=subprocess.STDOUT, cwd="/", **pipes
        )
        theirs.close()


def install(is_fresh: Callable[[], bool]) -> Nursery:
    """Have ``subprocess`` of this process fork its Python children, but while ``is_fresh()``."""
    nursery = Nursery()

    class WarmPopen(_ORDINARY):  # type: ignore[type-arg,misc]
        def _execute_child(self, *given: Any) -> None:
            asked = dict(zip(_EXECUTE_CHILD, given, strict=True))
            request = None if is_fresh() else _request(asked)
            if request is None:
                super()._execute_child(*given)
                return
            own = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
            streams = [number if asked[name] == -1 else asked[name] for name, number in own]
            process = nursery.fork(request, streams)
            if process is None:
                super()._execute_child(*given)
                return
            self.pid, self._child_created = process, True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in ends))

    subprocess.Popen = WarmPopen  # type: ignore[misc]
    return nursery


def keep_nothing_safe() -> None:
    """Let no write of this process and its forks wait for a disk: no test cuts the power."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    os.fsync = lambda file: None

    @event.listens_for(Engine, "connect")
    def careless(connection: Any, record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")


def _request(asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a fork is told, or None where only a fresh interpreter will do."""
    words = asked["args"]
    if asked["shell"] or isinstance(words, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(word) for word in words]
    special = ("executable", "preexec_fn", "gid", "gids", "uid", "startupinfo")
    if words[0] != sys.executable or any(asked[name] is not None for name in special):
        return None
    if asked["pass_fds"] or asked["umask"] != -1 or asked["process_group"] not in (-1, 0):
        return None
    # A flag but these two is one of the interpreter's own.
    if len(words) < 2 or (words[1][:1] == "-" and words[1] not in ("-m", "-c")):
        return None
    if words[1] == "-c" and any(word in words[2] for word in LOOKS_AT_ITSELF):
        return None
    cwd = Path(os.fsdecode(asked["cwd"] or ".")).absolute()
    if not cwd.is_dir():
        return None
    environment = os.environ if asked["env"] is None else asked["env"]
    return {
        "words": words[1:],
        "cwd": str(cwd),
        "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
        "new_session": bool(asked["start_new_session"]),
        "new_group": asked["process_group"] == 0,
    }


def _reap_orphans(these: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(these), 0, 0, 0)


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request; return the request in the child, None at the end."""
    known = {name.partition(".")[0] for name in sys.modules}
    while True:
        said, streams, _, _ = socket.recv_fds(line, _LONGEST, 3)
        if not said:
            return None
        request = json.loads(said)
        if why := _unlike(request, known):
            line.send(json.dumps({"process": None, "why": why}).encode())
        elif (child := _fork_orphan()) is None:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            return request
        else:
            line.send(json.dumps({"process": child}).encode())
        for stream in streams:
            os.close(stream)


def _unlike(request: dict[str, Any], known: set[str]) -> str:
    """Return what a fork would see otherwise than a fresh interpreter; empty if nothing."""
    environment = request["environment"]
    if any(environment.get(f"MLFLOW_{name}", value) != value for name, value in MLFLOW.items()):
        return "what MLflow reads at its import"
    for name in sorted({*environment, *os.environ} - {"PYTHONPATH"}):
        if name.startswith(READ_AT_IMPORT) and environment.get(name) != os.environ.get(name):
            return name
    first = request["words"][0]
    own = [request["cwd"]] if first in ("-m", "-c") else [str(Path(request["cwd"], first).parent)]
    added = [name for name in environment.get("PYTHONPATH", "").split(os.pathsep) if name]
    for folder in {*own, *added} - {*sys.path}:
        with suppress(OSError):
            names = {path.stem for path in Path(folder).iterdir()}
            if hidden := names & ({*known, "sitecustomize"} - _NEVER_HIDDEN):
                return f"{min(hidden)} in {folder}"
    return ""


def _fork_orphan() -> int | None:
    """Fork a process whose parent is gone; return its number, None in itself."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        child = os.fork()
        if child == 0:
            while os.getppid() == between:
                time.sleep(0.001)
            return None
        os.write(writer, str(child).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(between, 0)
    number = int(os.read(reader, 32))
    os.close(reader)
    return number


def _become(request: dict[str, Any]) -> None:
    """Be, from here on, what was asked for."""
    if request["new_session"]:
        os.setsid()
    elif request["new_group"]:
        os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)
    first, *rest = request["words"]
    # As the interpreter does: the script's folder, or this one, then PYTHONPATH, then its own.
    folders = [name for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    at = {"-m": request["cwd"], "-c": ""}.get(first, str(Path(request["cwd"], first).parent))
    sys.path[:] = [at, *folders, *_OWN_PATH]
    sys.argv[:] = [first, *rest] if first not in ("-m", "-c") else [*rest]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[0] = "-c"
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(first, run_name="__main__")


def _end(work: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> None:
    """End the process as the interpreter would after this work, but leave what it imported alone.

    To take that apart would touch, and so copy, all memory that is shared with the nursery.
    """
    status: Any = 0
    try:
        work(request)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError as error:
        print(f"Exception ignored in: {stream!r}\n{error!r}", file=sys.stderr)
        status = 120
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _given = [name for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    # Without this file's folder, which came first, and what PYTHONPATH added behind it.
    _OWN_PATH = sys.path[1 + len(_given) :]
    sys.path[:] = _OWN_PATH
    os.environ.update({f"MLFLOW_{name}": value for name, value in MLFLOW.items()})
    for _name in IMPORTED:
        import_module(_name)
    keep_nothing_safe()
    gc.collect()
    gc.freeze()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _asked is not None:
        _end(_become, _asked)
