"""Tensors that anything wrote: .safetensors, .npy, .npz and .pt files, read without running code.

A file from elsewhere may claim any size. What it claims is held against the memory there is before
anything of that size is made.
"""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from layerparity.ground import progress
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError, memory_ran_out
from layerparity.ground.files import damaged, inside, read_tensors, reading, tensor_shapes
from layerparity.machine.memory import free_host_memory

if TYPE_CHECKING:
    import torch

SUFFIXES = (".npy", ".npz", ".pt", ".safetensors")
CURE = "dump it again"
_SAVE = "save tensors, or a dict, list or tuple of them, with torch.save"
# Archives that stay open, and what lists that are held more than once may hold in all.
_OPEN, _REPEATED = 64, 1 << 16
# Files that stay mapped: Linux lets a process map 65,530.
_MAPPED = 1 << 14
_T = TypeVar("_T")


@dataclass(frozen=True)
class Dumped:
    """One tensor of a dump. ``key`` is its name in a file of several, empty where it is bare.

    It is None where the file holds one alone, by whatever name.

    ``names`` are what a name map may call it, the fullest first: path and key, or the path alone
    where the file holds nothing else. It is of a ``rank``, and of a ``step``: 0 is the prefill.
    """

    path: Path
    key: str | None
    names: tuple[str, ...]
    rank: int = 0
    step: int = 0


def find_tensors(folder: Path) -> list[Dumped]:
    """Return every tensor under a folder, sorted by file. Raises UserError where there is none."""
    tensors: list[Dumped] = []
    files = [each for each in sorted(folder.rglob("*")) if each.suffix in SUFFIXES]
    for path in progress.each("files", [each for each in files if each.is_file()]):
        relative = path.relative_to(folder)
        # No link to a folder is followed: nothing else leads out.
        if path.is_symlink():
            inside(folder, relative.as_posix(), CURE)
        stem = relative.with_suffix("").as_posix()
        keys = [""] if path.suffix == ".npy" else names_in(path)
        alone = (stem,) if len(keys) == 1 else ()
        tensors += [
            Dumped(path, key, (f"{stem}/{key}", *alone) if key else (stem,)) for key in keys
        ]
    if not tensors:
        raise UserError(
            f"{folder} holds no tensor in a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file: "
            "save some with safetensors.torch.save_file, numpy.save or torch.save."
        )
    for each in tensors:
        try:
            each.names[0].encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{each.names[0]} in {folder} is no UTF-8", "rename it.") from error
    return tensors


def names_in(path: Path) -> list[str]:
    """Return the names of a file's tensors; one that holds a bare tensor has an empty one.

    Raises UserError for a file that is damaged.
    """
    found = path.stat()
    return list(_names(path, found.st_size, found.st_mtime_ns))


@lru_cache(_OPEN)
def _names(path: Path, *stamp: int) -> tuple[str, ...]:
    """Return a file's names as it is now: several ask for them, to tell what wrote it."""
    if path.suffix == ".safetensors":
        return tuple(tensor_shapes(path, CURE))
    return tuple(NpzFile(path).names if path.suffix == ".npz" else read_pt(path))


class DumpFiles:
    """Reads the tensors of a dump's files, on the CPU; a file that holds several is opened once.

    An array of a .npz is unpacked each time it is asked for, so that one is held at a time.
    """

    def __init__(self, tensors: Mapping[Any, Dumped]) -> None:
        self._keys: dict[Path, list[str]] = {}
        for each in tensors.values():
            self._keys.setdefault(each.path, []).append(each.key or "")
        self._opened: dict[Path, dict[str, torch.Tensor]] = {}
        self._archive = lru_cache(_OPEN)(NpzFile)
        self._mapped = lru_cache(_MAPPED)(read_pt)

    def read(self, dumped: Dumped) -> torch.Tensor:
        """Return a tensor as dumped, of its own shape and dtype.

        Raises UserError where it is damaged, or holds no real numbers.
        """
        path, key = dumped.path, dumped.key
        if key is None:
            return sole(path)
        if path.suffix == ".npy":
            return real(read_npy(path), path)
        if path.suffix == ".npz":
            return real(self._archive(path).read(key), path, key)
        if path.suffix == ".json":
            return real(read_encoded(path, key), path, dumped.names[0])
        if path.suffix == ".pt":
            return real(self._mapped(path)[key], path, key)
        if path not in self._opened:
            self._opened[path] = read_tensors(path, self._keys[path], CURE)
        return real(self._opened[path][key], path, key)


def sole(path: Path) -> torch.Tensor:
    """Return the tensor of a .pt file. Raises UserError where it holds none, or several."""
    held = read_pt(path)
    if len(held) != 1:
        raise UserError(f"{path} holds {len(held)} tensors", "capture one module in a file.")
    return real(next(iter(held.values())), path)


def real(tensor: torch.Tensor, path: Path, name: str = "") -> torch.Tensor:
    """Return a tensor of any shape. Raises UserError where its numbers cannot be computed with."""
    what = f"{path}: {name}" if name else str(path)
    if tensor.is_complex():
        raise UserError(
            f"{what} holds complex numbers", "dump their real and imaginary parts, or their size."
        )
    if not _converts(tensor.dtype):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{what} holds {kind}, which torch cannot convert", "dump it as float32.")
    return tensor


@lru_cache
def _converts(dtype: torch.dtype) -> bool:
    """Say whether torch makes other numbers of a type: packed ones of four bits are bytes to it."""
    import torch

    try:
        torch.empty(1, dtype=dtype).double()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def read_npy(path: Path) -> torch.Tensor:
    """Return the array of a .npy file, of any shape and dtype, mapped. Raises UserError."""
    import numpy as np

    try:
        # Copy-on-write: torch wants writable memory, and nobody writes to it.
        return _tensor(np.lib.format.open_memmap(path, mode="c"))
    except Exception as error:
        # numpy evaluates the header as Python: a damaged one raises what it likes.
        raise _no_numbers(path, error, "numpy.save") from error


class NpzFile:
    """A .npz file that is open. Raises UserError where it is none."""

    def __init__(self, path: Path) -> None:
        self._path, self._archive = path, _archive(path)
        members = [each for each in self._archive.infolist() if not each.filename.endswith("/")]
        self._members = _once(
            path, ((each.filename.removesuffix(".npy"), each) for each in members)
        )

    @property
    def names(self) -> Iterable[str]:
        """The names of its arrays."""
        return self._members

    def read(self, name: str) -> torch.Tensor:
        """Return an array, of any shape and dtype, unpacked. Raises UserError."""
        import numpy as np

        member = self._members.get(name)
        if member is None:
            raise damaged(self._path, f"it holds no array '{name}'", CURE)
        try:
            with self._archive.open(member) as file:
                _refuse_claim(file, member.file_size)
            with self._archive.open(member) as file:
                return _tensor(np.lib.format.read_array(file, allow_pickle=False))
        except Exception as error:
            raise _no_numbers(self._path, error, "numpy.savez") from error


def read_encoded(path: Path, span: str) -> torch.Tensor:
    """Return the array of a .npy that stands as base64 between two places of a text file.

    ``span`` is ``start:end``, in bytes. Raises UserError where it is none.
    """
    import numpy as np

    start, _, end = span.partition(":")
    try:
        with path.open("rb") as file:
            file.seek(int(start))
            raw = base64.b64decode(file.read(int(end) - int(start)), validate=True)
        _refuse_claim(io.BytesIO(raw), len(raw))
        return _tensor(np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False))
    except Exception as error:
        raise _no_numbers(path, error, "numpy.save") from error


def _refuse_claim(file: IO[bytes], size: int) -> None:
    """Raise ValueError where a .npy of so many bytes claims more: that would be made at once."""
    import numpy as np

    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0
    read = header if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if prod(shape) * dtype.itemsize > size:
        raise ValueError("its header claims more than it holds")


def read_pt(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .pt file by name, of any shape and dtype; a bare one has none.

    A tensor in a dict, list or tuple is named by its keys, with ``/`` between them; what is no
    tensor is left out. They are mapped where torch wrote them so that they can be. Raises
    UserError where a pickle needs code, or claims more than there is memory.
    """
    import torch

    held = held_in(path)
    try:
        tensors = _once(path, _flat("", held, {}))
    except RecursionError as error:
        raise damaged(path, "it holds itself", _SAVE) from error
    except ValueError as error:
        # Also of a key that is a whole number of more digits than Python writes.
        raise damaged(path, error, _SAVE) from error
    if not tensors:
        raise UserError(f"{path} holds no tensor ({type(held).__name__})", f"{_SAVE}.")
    for name, tensor in tensors.items():
        whole = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not whole or tensor.is_quantized or tensor.is_nested:
            raise UserError(f"{path}: {name or 'it'} has no plain numbers", "dump it dense.")
        # One number, seen again and again, may pose as more than any memory holds.
        _refuse_large(path, tensor.numel() * tensor.element_size())
    return tensors


def held_in(path: Path) -> object:
    """Return what a .pt file holds, containers and all; `read_pt` looks at its tensors.

    Raises UserError where a pickle needs code, or claims more than there is memory.
    """
    import torch

    try:
        packed = zipfile.is_zipfile(path)
    except zipfile.BadZipFile as error:
        raise damaged(path, error, CURE) from error
    if packed:
        _archive(path).close()
    try:
        held: object = torch.load(path, map_location="cpu", weights_only=True, mmap=packed)
        return held
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is a pickle that would run code, or none at all, and is not opened",
            f"{_SAVE}.",
        ) from error
    except Exception as error:
        # Opcodes of a damaged pickle raise what they like.
        raise _no_numbers(path, error, "torch.save") from error


def _flat(name: str, held: object, known: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that nested containers hold, each by the keys that lead to it.

    ``known`` has each container that was seen; under 0, how much those held that were seen again.
    Raises ValueError for more than any dump says twice: lists that hold each other have no end.
    """
    import torch

    if isinstance(held, torch.Tensor):
        yield name, held.detach()
    if not isinstance(held, Mapping | list | tuple):
        return
    known[0] = known.get(0, 0) + known.setdefault(id(held), 0)
    if known[0] > _REPEATED:
        raise ValueError("its lists hold each other")
    known[id(held)] = 1 + len(held)
    pairs: Iterable[tuple[object, object]] = (
        held.items() if isinstance(held, Mapping) else enumerate(held)
    )
    for key, value in pairs:
        yield from _flat(f"{name}/{key}" if name else str(key), value, known)


def _once(path: Path, named: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    """Return what stands under each name in a file. Raises UserError where two share one."""
    found: dict[str, _T] = {}
    for name, each in named:
        if name in found:
            raise UserError(f"{path} holds two tensors named '{name}'", f"{CURE} as two names.")
        found[name] = each
    return found


def _archive(path: Path) -> zipfile.ZipFile:
    """Open a zip file. Raises UserError where what it packs is larger than the memory."""
    with reading(path, CURE):
        try:
            archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(error) from error
    # What is not packed is as large as the file, and mapped.
    packed = [e.file_size for e in archive.infolist() if e.compress_type != zipfile.ZIP_STORED]
    _refuse_large(path, sum(packed))
    return archive


def _refuse_large(path: Path, size: int) -> None:
    """Raise UserError where so many bytes are more than this process can take.

    As many as the file itself has are mapped.
    """
    free = free_host_memory() if size > path.stat().st_size else size
    if size > free:
        raise UserError(
            f"{path} claims to unpack to {bytes_text(size)}, and {bytes_text(free)} of memory are "
            "free",
            "dump fewer tensors a file, as .safetensors, or check the file.",
        )


def _tensor(array: Any) -> torch.Tensor:
    """Return a numeric numpy array of any shape as a tensor, in the machine's order of bytes."""
    import torch

    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _no_numbers(path: Path, error: Exception, saver: str) -> Exception:
    """Return what is said of a file that cannot be read; the error itself where memory ran out."""
    if memory_ran_out(error):
        return error
    said = " ".join(str(error).split())[:200]
    return UserError(
        f"{path} cannot be read as numbers ({said}). Save it again with {saver} from numeric "
        "tensors; numpy has no bfloat16: save that as float32, or as .safetensors."
    )
