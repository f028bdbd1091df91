"""Python processes that begin with torch, transformers and MLflow imported, for tests.

What a test starts with ``sys.executable`` pays seconds of imports before its first line. `install`
has ``subprocess`` ask a process that has them, the nursery, for a fork of itself instead: a child
of the test's own process, with the words, folder, environment, streams and session that it would
have had. Where a fork would not be the same, a fresh interpreter is started as ever: with flags of
the interpreter, with other variables that a library reads when it is imported, where a module hides
an imported one or code looks at its own process, and in a test marked ``fresh_interpreter``. So it
is with what a child starts: each has a nursery of its own, forked before the child did anything.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import faulthandler
import fcntl
import gc
import inspect
import io
import json
import multiprocessing.process
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
    *("hydra.main", "rich.table", "blake3", "alembic.command", "sqlalchemy.dialects.sqlite"),
    # What a server of MLflow imports, but its own modules: they read their variables then.
    *("graphene", "flask_cors", "huey", "uvicorn", "aiohttp", "mlflow.gateway.config"),
)
# Variables that the interpreter or a library reads once, when it begins.
READ_AT_IMPORT = (
    *("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "GOMP_", "OPENBLAS", "ATEN_", "ONEDNN", "DNNL"),
    *("NUMBA", "TORCH", "HF_", "HUGGINGFACE", "TRANSFORMERS_", "USE_", "CUDA_HOME", "CUDA_PATH"),
    *("LC_", "LANG", "MALLOC_", "TOKENIZERS", "HOME", "XDG_", "ACCELERATE"),
)
# Not among them: what a fork does as told, what torch sets once it compiles, joblib's for an OpenMP
# that torch does not use, and what would keep torch from importing backends, of which none is here.
NOT_READ = {
    *("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCHINDUCTOR_CACHE_DIR", "KMP_INIT_AT_FORK"),
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
}
# Not on purpose; the last is one that torch writes into a folder of its own.
_NEVER_HIDDEN = {*sys.stdlib_module_names, "__main__", "_remote_module_non_scriptable"}
# What layerparity has MLflow read at its import, where it is unset.
NO_TELEMETRY, LEVEL, QUIET = "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_LOGGING_LEVEL", "CRITICAL"
# Code that asks what its own process has imported, or how much it took.
LOOKS_AT_ITSELF = ("sys.modules", "import gc", "RLIMIT_DATA", "rusage")
# The words behind which a command has users and mounts of its own, and what stands for them.
NAMESPACE = ["unshare", "--map-root-user", "--mount"]
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_REC, _MS_PRIVATE = 1 << 17, 1 << 28, 1 << 14, 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
# A request and its answer; the environment is most of it.
_LONGEST = 1 << 20
_MOST_FILES = 32
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ORDINARY = getattr(subprocess.Popen, "ordinary", subprocess.Popen)
# What ``Popen._execute_child`` is given, in order.
_EXECUTE_CHILD = (*inspect.signature(_ORDINARY._execute_child).parameters,)[1:]


class Nursery:
    """A process that has imported what most children need, and forks; begun when first asked."""

    def __init__(self, line: socket.socket | None = None) -> None:
        # That it begins with, and why the last child was none of its forks.
        self.environment: dict[str, str] = {}
        self.refused = ""
        self._line = line
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, request: dict[str, Any], streams: list[int]) -> int | None:
        """Return the process number of a new child of this process, None where none can be had.

        Its open files are ``streams``: 0, 1, 2, and those that the request names as passed.
        """
        with self._lock:
            if self._line is None:
                self._begin()
            assert self._line is not None
            # An orphan goes to its nearest ancestor that asks for it. Only now: later ones are
            # init's.
            _reap_orphans(True)
            try:
                socket.send_fds(self._line, [json.dumps(request).encode()], streams)
                answer = json.loads(self._line.recv(_LONGEST))
            finally:
                _reap_orphans(False)
        self.refused = answer.get("why", "")
        return answer["process"]

    def _begin(self) -> None:
        self._line, theirs = _pair()
        words = [sys.executable, __file__, str(theirs.fileno())]
        self.environment = dict(os.environ)
        # Streams that cannot be sought: what Python learns of them at its beginning fits a pipe.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = _ORDINARY(
            words, pass_fds=[theirs.fileno()], stderr=subprocess.STDOUT, cwd="/", **pipes
        )
        theirs.close()


def mine() -> Nursery:
    """Return the nursery of this process: where it is a fork of one, that which came with it."""
    return getattr(subprocess.Popen, "asks", None) or Nursery()


def install(nursery: Nursery, is_fresh: Callable[[], bool] = lambda: False) -> None:
    """Have ``subprocess`` of this process fork its Python children, but while ``is_fresh()``."""

    class WarmPopen(_ORDINARY):  # type: ignore[type-arg,misc]
        ordinary, asks = _ORDINARY, nursery

        def _execute_child(self, *given: Any) -> None:
            asked = dict(zip(_EXECUTE_CHILD, given, strict=True))
            request = None if is_fresh() else _request(asked)
            if request is None:
                super()._execute_child(*given)
                return
            own = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
            streams = [number if asked[name] == -1 else asked[name] for name, number in own]
            process = nursery.fork(request, [*streams, *request["passed"]])
            if process is None:
                super()._execute_child(*given)
                return
            self.pid, self._child_created = process, True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in ends))

    subprocess.Popen = WarmPopen  # type: ignore[misc]


def answer_spawns(nursery: Nursery) -> None:
    """Have what multiprocessing and joblib start of this process be forks as well."""
    ordinary = _posixsubprocess.fork_exec

    def fork_exec(words: Any, executables: Any, closes: Any, passed: Any, *rest: Any) -> int:
        cwd, environment = rest[:2]
        pairs = [os.fsdecode(pair).partition("=") for pair in environment or ()]
        asked = dict.fromkeys(_EXECUTE_CHILD) | {
            **{"args": words, "pass_fds": passed, "cwd": cwd, "umask": -1, "process_group": -1},
            "env": {name: value for name, _, value in pairs} if pairs else None,
        }
        request = _request(asked)
        process = request and nursery.fork(request, [0, 1, 2, *request["passed"]])
        return process or ordinary(words, executables, closes, passed, *rest)

    _posixsubprocess.fork_exec = fork_exec


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
    in_namespace = words[: len(NAMESPACE)] == NAMESPACE
    words = words[len(NAMESPACE) :] if in_namespace else words
    special = ("executable", "preexec_fn", "gid", "gids", "uid", "startupinfo")
    if words[:1] != [sys.executable] or any(asked[name] is not None for name in special):
        return None
    if asked["umask"] != -1 or asked["process_group"] not in (-1, 0):
        return None
    unbuffered = words[1:2] == ["-u"]
    words = [words[0], *words[2:]] if unbuffered else words
    # What this process was told as well.
    if words[1:2] == ["-B"] and sys.dont_write_bytecode:
        words = [words[0], *words[2:]]
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
        "in_namespace": in_namespace,
        "unbuffered": unbuffered,
        "passed": sorted(asked["pass_fds"] or ()),
    }


def _reap_orphans(these: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(these), 0, 0, 0)


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request; return the request in the child, None at the end."""
    known = {name.partition(".")[0] for name in sys.modules}
    while True:
        said, streams, _, _ = socket.recv_fds(line, _LONGEST, _MOST_FILES)
        if not said:
            return None
        request = json.loads(said)
        if why := _unlike(request, known):
            line.send(json.dumps({"process": None, "why": why}).encode())
        elif (child := _fork_orphan(request)) is not None:
            line.send(json.dumps({"process": child}).encode())
        else:
            # Mounts are a child's alone: what its nursery forks would not see them.
            theirs = None if request["in_namespace"] else _branch(request)
            if theirs is None:
                # What came until here ends it now.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
                _hold(streams, [0, 1, 2, *request["passed"]], request.get("line"))
                return request
            line, streams = theirs, []
        for stream in streams:
            os.close(stream)


def _branch(request: dict[str, Any]) -> socket.socket | None:
    """Fork a nursery of this child's own: return the line to the child in it, None in the child."""
    own, theirs = _pair()
    if os.fork():
        theirs.close()
        above = max([2, *request["passed"]]) + 1
        request["line"] = fcntl.fcntl(own.detach(), fcntl.F_DUPFD_CLOEXEC, above)
        return None
    # What ends the child's group is not for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    nothing = os.open(os.devnull, os.O_RDWR)
    own.detach()
    _hold([nothing] * 3, [0, 1, 2], theirs.fileno())
    return theirs


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a line, each of which takes a whole request."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    return ends


def _hold(files: list[int], numbers: list[int], line: int | None) -> None:
    """Have these open files under these numbers, and besides them the line alone."""
    free = max(*numbers, line or 0) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, free) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    kept = sorted({*numbers, line or 0})
    for one, other in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(one + 1, other)


def _unlike(request: dict[str, Any], known: set[str]) -> str:
    """Return what a fork would see otherwise than a fresh interpreter; empty if nothing."""
    environment = request["environment"]
    if environment.get(NO_TELEMETRY, "true") != "true":
        return NO_TELEMETRY
    for name in sorted({*environment, *os.environ} - NOT_READ):
        if name.startswith(READ_AT_IMPORT) and environment.get(name) != os.environ.get(name):
            return name
    first = request["words"][0]
    own = [request["cwd"]] if first in ("-m", "-c") else [str(Path(request["cwd"], first).parent)]
    added = [name for name in environment.get("PYTHONPATH", "").split(os.pathsep) if name]
    for folder in {*own, *added} - {*sys.path}:
        with suppress(OSError):
            found = [path for path in Path(folder).iterdir() if _is_module(path)]
            names = {path.name.partition(".")[0] for path in found}
            hidden = names & ({*known, "sitecustomize"} - _NEVER_HIDDEN)
            if hidden := {name for name in hidden if not _is_from(name, folder)}:
                return f"{min(hidden)} in {folder}"
    return ""


def _is_from(name: str, folder: str) -> bool:
    """Say whether what was imported by this name is the very one that the folder holds."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and Path(file).is_relative_to(Path(folder).resolve())


def _is_module(path: Path) -> bool:
    return path.suffix in (".py", ".pyc", ".so") or path.is_dir()


def _fork_orphan(request: dict[str, Any]) -> int | None:
    """Fork a process whose parent is gone; return its number, None in itself.

    It leads its session or group by then: who started it may ask at once whose it is.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        if request["new_session"]:
            os.setsid()
        elif request["new_group"]:
            os.setpgid(0, 0)
        os.write(writer, str(os.getpid()).encode())
        os.close(reader)
        os.close(writer)
        return None
    os.close(writer)
    os.waitpid(between, 0)
    number = int(os.read(reader, 32))
    os.close(reader)
    return number


def _become(request: dict[str, Any]) -> None:
    """Be, from here on, what was asked for."""
    if request["in_namespace"]:
        _enter_namespace()
    if request["unbuffered"]:
        for name in ("stdout", "stderr"):
            raw = open(getattr(sys, name).fileno(), "wb", 0, closefd=False)  # noqa: SIM115
            old = getattr(sys, name)
            text = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
            setattr(sys, name, text)
    if "line" in request:
        nursery = Nursery(socket.socket(fileno=request["line"]))
        nursery.environment = dict(os.environ)
        install(nursery)
        answer_spawns(nursery)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    # Where multiprocessing looks for a script that was given by its name alone.
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if os.environ.get(LEVEL, QUIET) != QUIET:
        logging_utils = import_module("mlflow.utils.logging_utils")
        logging_utils._configure_mlflow_loggers(root_module_name="mlflow")
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


def _enter_namespace() -> None:
    """Have users and mounts of its own, as behind the words of `NAMESPACE`."""
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path("/proc/self", name).write_text(text)
    if library.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mount")


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
            if stream is not None and not stream.closed:
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
    os.environ.update({NO_TELEMETRY: "true", LEVEL: QUIET})
    for _name in IMPORTED:
        import_module(_name)
    # Made once a process of 1,044 patterns: 0.1 s of each child that opens a model.
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    keep_nothing_safe()
    gc.collect()
    gc.freeze()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _asked is None:
        os._exit(0)
    _end(_become, _asked)
