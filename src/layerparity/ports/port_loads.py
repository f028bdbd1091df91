"""Note what a port of one's own imports and reads, and say what of it is no longer as it was.

A fingerprint is made before a port runs, so it cannot hold what the port will load. That is noted
while it does so, kept with the run, and looked at before the run is reused or resumed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from blake3 import blake3

from layerparity.ground.files import text_digest
from layerparity.record.loaded import PortLoads

NOT_SEEN = (
    "what compiled code opens by itself, variables that libraries or compiled code read, what "
    "other processes read, variables that are listed or copied all together, which files a folder "
    "has, the network, and what a module read when another program imported it"
)
# As it is called, and where a link leads: code says the one, what is compiled may say the other.
_PACKAGE = tuple(
    str(each.parents[1]) + os.sep for each in {Path(__file__).absolute(), Path(__file__).resolve()}
)
_STANDARD = tuple(
    each + os.sep
    for name in ("stdlib", "platstdlib")
    for each in {sysconfig.get_path(name), os.path.realpath(sysconfig.get_path(name))}
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MACHINE = ("/proc/", "/sys/", "/dev/")
_OF_PROCESS = re.compile(re.escape(tempfile.gettempdir() + os.sep) + rf"tmp\w{{8}}{os.sep}")
# Bytes of a file that is hashed; size and times stand for those of a larger one.
_LARGE = 1 << 26
_ABSENT = "absent"
_PYTHON = "python"


@dataclass
class _Noted:
    """What was noted in this process; it only grows, as what is imported stays.

    ``mine`` are the packages of ports, also installed ones. ``before`` are variables as they were
    before a port, or layerparity, set them; ``written`` are files that a port made; ``seen`` are
    modules that were looked at, of which there are thousands.
    """

    loaded: PortLoads = field(default_factory=PortLoads)
    mine: set[str] = field(default_factory=set)
    before: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    seen: dict[str, ModuleType] = field(default_factory=dict)
    on: bool = False


_noted = _Noted()
# Whether a thread reads a file itself.
_own = threading.local()


def watch(target: str) -> None:
    """Note from now on what the port of this dotted path loads; call it before its import."""
    top = target.partition(".")[0]
    if top not in _noted.mine:
        _noted.mine.add(top)
        _noted.seen.clear()
        _whose.cache_clear()
    if not _noted.on:
        _noted.on = True
        # Python has no event for a variable that is read, safetensors none for a file.
        os.environ.__class__ = _NotedEnvironment
        _announce_safetensors()
        # It cannot be taken back: what follows goes by who opens something.
        sys.addaudithook(_heard)


def now() -> PortLoads | None:
    """Return what ports loaded in this process; None where none of one's own was made."""
    if not _noted.on:
        return None
    imported = dict(sys.modules)
    new = {name: each for name, each in imported.items() if _noted.seen.get(name) is not each}
    for name, module in new.items():
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if not isinstance(file, str) or (name == "__main__" and name not in _noted.mine):
            continue
        # torch writes a module into a temporary folder that each process has of its own.
        if _whose(file) == "port" and not _OF_PROCESS.match(file):
            _noted.loaded.modules[name] = file
            place = _absolute(file)
            # What was noted when it was opened is what was read, whatever is there by now.
            if place not in _noted.loaded.files:
                _noted.loaded.files[place] = _mark(place)
    _note_libraries(new)
    _noted.seen.update(new)
    # A port's threads may go on.
    return PortLoads(
        **{each.name: dict(getattr(_noted.loaded, each.name)) for each in fields(PortLoads)}
    )


def take(other: PortLoads, without: dict[str, str] | None = None) -> None:
    """Add what was loaded in another process, but variables that only that one has."""
    _noted.loaded.update(other, without)


def changed(loaded: PortLoads) -> Iterator[str]:
    """Yield what is no longer as a run's port found it, in words."""
    importlib.invalidate_caches()
    for name, file in loaded.modules.items():
        there = _found(name)
        if there and not _is_same(there, file):
            yield f"module {name} is {there} now, and was {file}"
    for path, mark in loaded.files.items():
        here = _mark(path)
        if here != mark:
            words = {mark: "is new", here: "is gone"}
            yield f"{path} {words.get(_ABSENT, 'has changed')}"
    for name, version in loaded.libraries.items():
        here = _library(name)
        if here != version:
            yield f"library {name} is {here.partition(' ')[0]}, and was {version.partition(' ')[0]}"
    for name, mark in loaded.variables.items():
        if _value(name) != mark:
            yield f"variable {name} has another value"


def _is_same(there: str, file: str) -> bool:
    return _absolute(there) == _absolute(file)


def _absolute(path: str) -> str:
    # Where the folder that the process stands in was removed, nothing else is known.
    try:
        return os.path.abspath(path)  # noqa: PTH100
    except FileNotFoundError:
        return path


@cache
def _whose(file: str) -> str:
    """Return whose code a file holds: ``ours``, a ``library``, or a ``port``."""
    path = _absolute(file)
    if path.startswith(_PACKAGE):
        return "ours"
    for home in _INSTALLED:
        _, found, inside = path.rpartition(home)
        if found:
            top = inside.partition(os.sep)[0].partition(".")[0]
            return "port" if top in _noted.mine else "library"
    return "library" if file.startswith("<") or path.startswith(_STANDARD) else "port"


def _stack() -> Iterator[str]:
    """Yield whose code is on the stack that is no library's, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and (whose := _whose(file)) != "library":
            yield whose
        frame = frame.f_back


def _by_a_port() -> bool:
    """Say whether a port asks, itself or through a library, while a run calls it."""
    asking = list(_stack())
    # A thread that a port starts has no caller.
    threaded = threading.current_thread() is not threading.main_thread()
    return asking[:1] == ["port"] and ("ours" in asking or threaded)


def _asked_directly() -> bool:
    """Say whether a port's own code reads a variable: libraries read hundreds when imported."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    return frame is not None and _whose(frame.f_code.co_filename) == "port"


def _inside_a_run() -> bool:
    """Say whether layerparity is on the stack: what a caller does on its own is no port's."""
    return "ours" in _stack()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """Note a file that a port opens, or a shared library that it loads."""
    if event not in ("open", "ctypes.dlopen") or getattr(_own, "reads", False):
        return
    if event == "open" and len(arguments) < 3:
        # Anybody may announce an event of that name.
        return
    named = arguments[0]
    if not isinstance(named, str | bytes | os.PathLike):
        return
    path = _source(os.fsdecode(named))
    place = _absolute(path)
    access = arguments[2] & os.O_ACCMODE if event == "open" else os.O_RDONLY
    # What is mapped for reading and writing, as numpy.memmap does unasked, is read first.
    anew = access == os.O_RDWR and not os.path.exists(place)  # noqa: PTH110
    if access == os.O_WRONLY or anew or (access and arguments[2] & (os.O_TRUNC | os.O_APPEND)):
        # What the caller of a run wrote is an input of it.
        (_noted.written.add if _inside_a_run() else _noted.written.discard)(place)
        return
    known = place in _noted.written or place.startswith(_MACHINE) or _whose(path) != "port"
    known = known or _OF_PROCESS.match(place) is not None
    if not known and _by_a_port() and (mark := _mark(place)):
        _noted.loaded.files[place] = mark


def _source(path: str) -> str:
    """Return the module's text for its bytecode, which keeps its hash when the text changes."""
    if path.endswith(".pyc"):
        with suppress(ValueError, NotImplementedError):
            text = importlib.util.source_from_cache(path)
            return text if os.path.exists(text) else path  # noqa: PTH110
    return path


def _mark(path: str) -> str:
    """Return what tells a file's content; empty for what is no plain file."""
    try:
        about = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(about.st_mode):
            return ""
        if about.st_size > _LARGE:
            return f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"
        return _hashed(path)
    except (OSError, ValueError):
        return _ABSENT


def _hashed(path: str) -> str:
    _own.reads = True
    try:
        return str(blake3(Path(path).read_bytes()).hexdigest())
    finally:
        _own.reads = False


def _found(name: str) -> str:
    """Return where Python would find a module now, none imported; empty where it would not."""
    place: Any = None
    spec, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        specs = (_asked(finder, full, place) for finder in sys.meta_path)
        spec = next((each for each in specs if each), None)
        if spec is None:
            return ""
        place = spec.submodule_search_locations
    return (spec and spec.origin) or ""


def _asked(finder: Any, full: str, place: Any) -> Any:
    # A library's finder may refuse a name in whatever way it likes.
    with suppress(Exception):
        return finder.find_spec(full, place)


def _note_libraries(modules: Iterable[str]) -> None:
    """Note the distributions of imported modules, and Python, each as `_library` says."""
    held = _distributions(tuple(sys.path))
    tops = {name.partition(".")[0] for name in modules}
    names = {_PYTHON}.union(*(held.get(top, ()) for top in tops))
    # What is imported stays, whatever is installed by now.
    for name in names - {*_noted.loaded.libraries}:
        _noted.loaded.libraries[name] = _library(name)


@cache
def _distributions(path: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the names of the distributions on a search path that hold each top-level package."""
    held: dict[str, set[str]] = {}
    for each in metadata.distributions(path=[*path]):
        lines = (each.read_text("RECORD") or "").splitlines()
        # What has no metadata has no name.
        for top in {line.split("/", 1)[0].split(",", 1)[0].split(".", 1)[0] for line in lines}:
            if each.name:
                held.setdefault(top, set()).add(each.name)
    return held


def _library(name: str) -> str:
    """Return a distribution's version and the hash of the list of its files; ``missing``."""
    if name == _PYTHON:
        return platform.python_version()
    try:
        there = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return "missing"
    return f"{there.version} {text_digest(there.read_text('RECORD') or '')}"


def _value(name: str) -> str:
    """Return the hash of a variable as the run's caller set it; empty for none."""
    if name in _noted.before:
        return _noted.before[name]
    # Not by a method, which notes it.
    environment: Any = os.environ
    value = environment._data.get(environment.encodekey(name))
    return "" if value is None else str(blake3(value).hexdigest())


class _NotedEnvironment(os._Environ[str]):
    """``os.environ``, which notes what a port reads of it, and what was set during a run."""

    def keys(self) -> Any:
        """Return the names; whoever asks for them to copy all reads none of them."""
        environment: Any = self
        _own.copied = [_place(sys._getframe(1)), len(environment._data)]
        return super().keys()

    def items(self) -> Any:
        """Return all names and values as they are by now; none is noted as read."""
        return self.copy().items()

    def values(self) -> Any:
        """Return all values as they are by now; none is noted as read."""
        return self.copy().values()

    def __getitem__(self, name: Any) -> Any:
        copied = _is_copied(_place(sys._getframe(1)))
        if isinstance(name, str) and not copied and _asked_directly() and _by_a_port():
            _noted.loaded.variables[name] = _value(name)
        return super().__getitem__(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        _keep(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        _keep(name)
        super().__delitem__(name)


def _place(frame: FrameType) -> tuple[int, int]:
    """Return which call asks, and by which instruction: a copy asks for all names by one of one."""
    return id(frame), frame.f_lasti


def _is_copied(place: tuple[int, int]) -> bool:
    """Say whether a name is asked for as one of all: as many as there are, and none in between."""
    copied = getattr(_own, "copied", None)
    if copied is None:
        return False
    asked_at, left = copied
    # Another call may have the same place later on.
    _own.copied = [asked_at, left - 1] if asked_at == place and left > 1 else None
    return bool(asked_at == place)


def _keep(name: Any) -> None:
    """Keep a variable's value before a run sets it; what its caller sets is the caller's."""
    if isinstance(name, str):
        if _inside_a_run():
            _noted.before.setdefault(name, _value(name))
        else:
            _noted.before.pop(name, None)


def _announce_safetensors() -> None:
    """Have safetensors say what it opens, as Python's own ``open`` does."""
    import safetensors

    real = safetensors.safe_open

    @wraps(real, updated=())
    def announced(filename: Any, *given: Any, **named: Any) -> Any:
        sys.audit("open", filename, "r", os.O_RDONLY)
        return real(filename, *given, **named)

    # Also where it was imported by name.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("safe_open") is real:
            vars(module)["safe_open"] = announced
