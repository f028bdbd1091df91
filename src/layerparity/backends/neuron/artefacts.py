"""Keep compiled graphs in a folder by what they compute, and load them instead of compiling.

A file holds a graph's bytes and where its inputs come from, as safetensors: reading one runs no
code. torch_xla's own folders hold NumPy files that may be pickles, so they are not used.
"""

from __future__ import annotations

import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from layerparity.backends.neuron.compiler_options import ReuseCompiled
from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.ground.files import read_tensors, reading, text_digest, whole_file, writing

_HEADER, _PAYLOAD, _CONSTANT = "header", "payload", "constant."
# What a file holds; another number is another form.
_FORM = 2
# A graph for another number of devices is like one of another version.
_DEGREE = "tp_degree"
# Letters of a digest in a file's name, and of that of the versions.
_LONG, _SHORT = 32, 12

# Called with inputs of the graph, of any shape and dtype; returns its outputs, in order.
Runner = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Compiled:
    """A graph as a compiler made it: its bytes, and where each of its inputs comes from.

    An input is an argument by its place, a state of the module by its name, or, as ``(n,)``, the
    n-th of the ``constants`` that the compiler added. ``outputs`` are names of what it returns, in
    order, where the program does not say so.
    """

    payload: bytes
    inputs: tuple[int | str | tuple[int], ...]
    constants: tuple[torch.Tensor, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Header:
    """What a file says of the graph in it.

    ``graph`` is the digest of the program and the options that it was compiled from, whatever the
    file is called; ``contents`` is the hash of all that is read of the file.
    """

    form: int
    graph: str
    versions: dict[str, str]
    contents: str
    inputs: list[Any]
    outputs: list[str] = field(default_factory=list)


class GraphMaker(ABC):
    """Make bytes of a program that can be kept."""

    @property
    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """The compiler, the packages that decide what it makes."""

    @property
    @abstractmethod
    def options(self) -> Mapping[str, str]:
        """The settings that decide what it makes."""

    def layout(self, program: Any) -> str:
        """Say over how many devices a program is compiled, and how its tensors are split."""
        return "1"

    @abstractmethod
    def compile(self, program: Any, digest: str) -> Compiled:
        """Compile a program; ``digest`` names it. Raises UserError where it cannot."""


class GraphCompiler(GraphMaker):
    """Make bytes of a ``torch.export.ExportedProgram``, and run such bytes."""

    @abstractmethod
    def runner(self, compiled: Compiled) -> Runner:
        """Return what runs a graph that was compiled here or elsewhere."""


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages; ``missing`` of those that are not installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


@dataclass
class ArtefactFolder:
    """Compiled graphs of one compiler in one folder; what was made and loaded is counted.

    ``say`` is told, in one line each, of files that cannot be used.
    """

    folder: Path
    reuse: ReuseCompiled
    say: Callable[[str], None]
    compiled: int = field(default=0, init=False)
    loaded: int = field(default=0, init=False)

    @property
    def work(self) -> Path:
        """Where Neuron's compiler may work."""
        return self.folder / "work"

    def counted(self) -> dict[str, str]:
        """Return how many graphs were made here and how many loaded, as tags."""
        return {"artefacts_compiled": str(self.compiled), "artefacts_loaded": str(self.loaded)}

    def get(self, program: Any, digest: str, compiler: GraphMaker) -> Compiled:
        """Return the graph of a program with this digest: loaded, or compiled and kept.

        Raises UserError where nothing may be compiled, and where the disk refuses.
        """
        # Versions stand apart in the name, so that a graph of other ones is found and named.
        digest = text_digest(json.dumps([digest, dict(compiler.options)], sort_keys=True))
        versions = {**compiler.versions, _DEGREE: compiler.layout(program)}
        release = text_digest(json.dumps(versions, sort_keys=True))
        path = self.folder / f"{digest[:_LONG]}-{release[:_SHORT]}.safetensors"
        looked = self.reuse is not ReuseCompiled.never
        found = self._load(path, digest, versions) if looked else None
        if found is not None:
            self.loaded += 1
            return found
        if self.reuse is ReuseCompiled.only:
            raise UserError(
                f"{self.folder} holds no compiled graph {path.stem} that can be used, and "
                "backend.reuse_compiled=only compiles none",
                "run once with backend.reuse_compiled=auto, or give the folder that has it as "
                "backend.artefacts.",
            )
        made = compiler.compile(program, path.stem)
        _write(path, made, digest, versions)
        self.compiled += 1
        return made

    def _load(self, path: Path, graph: str, versions: dict[str, str]) -> Compiled | None:
        """Return what a file holds; None, with a line, where it cannot be used."""
        if path.is_file():
            try:
                _refuse_others(path)
                return _read(path, graph, versions)
            except UserError as error:
                self.say(f"{error.found}: the graph is compiled again.")
                return None
        for other in sorted(path.parent.glob(f"{path.name[:_LONG]}-*.safetensors")):
            try:
                theirs = _header(other).versions
            except UserError:
                continue
            differ = sorted(k for k in {*theirs, *versions} if theirs.get(k) != versions.get(k))
            said = ", ".join(f"{name} {theirs.get(name, 'missing')}" for name in differ)
            self.say(f"{other} was compiled with {said}: the graph is compiled again.")
            break
        return None


def _refuse_others(path: Path) -> None:
    """Raise UserError where another user than this one, or root, may have written a file.

    What is in it goes to the device's runtime as it stands, and no hash in it vouches for itself.
    """
    about = path.stat()
    if about.st_uid not in (0, os.geteuid()):
        raise UserError(f"{path} belongs to another user ({about.st_uid})")
    if about.st_mode & stat.S_IWOTH:
        raise UserError(f"{path} can be written by every user")


def _read(path: Path, graph: str, versions: dict[str, str]) -> Compiled:
    """Return what a file holds. Raises UserError where it is damaged, or another graph's."""
    header, tensors = _header(path), read_tensors(path)
    with reading(path):
        if header.form != _FORM or header.versions != versions:
            raise ValueError("it is of another version")
        if header.graph != graph:
            raise ValueError("it was compiled from another graph than its name says")
        # JSON has no tuples, and `(n,)` is known by being one.
        inputs = tuple(tuple(each) if isinstance(each, list) else each for each in header.inputs)
        constants = sorted(name for name in tensors if name.startswith(_CONSTANT))
        kept = tuple(tensors[name] for name in constants)
        payload = tensors[_PAYLOAD].numpy().tobytes() if _PAYLOAD in tensors else b""
        found = Compiled(payload, inputs, kept, tuple(header.outputs))
        if _contents(found, graph, versions) != header.contents:
            raise ValueError("its bytes are not those that were written")
    return found


def _contents(made: Compiled, graph: str, versions: Mapping[str, str]) -> str:
    """Return the hash of a graph with all that is kept beside it."""
    constants = [(str(each.dtype), list(each.shape)) for each in made.constants]
    told = [graph, dict(versions), made.inputs, made.outputs, constants]
    parts = [json.dumps(told, sort_keys=True).encode(), made.payload]
    # As bytes, for numpy has no bfloat16.
    flat = (each.contiguous().flatten().view(torch.uint8) for each in made.constants)
    parts += [each.numpy().tobytes() for each in flat]
    # A hash of hashes, so that no byte can move from one part to the next unseen.
    return blake3(b"".join(blake3(each).digest() for each in parts)).hexdigest()


def _header(path: Path) -> _Header:
    """Return a file's header. Raises UserError where there is none that can be read."""
    stored = read_tensors(path, [_HEADER])[_HEADER]
    with reading(path):
        header: _Header = decode(_Header, json.loads(stored.numpy().tobytes()))
    return header


def _write(path: Path, made: Compiled, graph: str, versions: dict[str, str]) -> None:
    """Write a file that is either whole or absent. Raises UserError where the disk refuses."""
    from safetensors.torch import save_file

    contents = _contents(made, graph, versions)
    header = _Header(_FORM, graph, versions, contents, list(made.inputs), list(made.outputs))
    tensors = {
        _HEADER: _bytes(json.dumps(asdict(header)).encode()),
        _PAYLOAD: _bytes(made.payload),
        # Zeros in front keep their order when names are sorted.
        **{f"{_CONSTANT}{n:04}": each.contiguous() for n, each in enumerate(made.constants)},
    }
    with writing(path), whole_file(path) as part:
        save_file(tensors, part)


def _bytes(data: bytes) -> torch.Tensor:
    # torch warns of memory that cannot be written, as that of bytes is.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
