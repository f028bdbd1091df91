"""Write files that are either whole or absent; hash and read tensors."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.ground.parse import parse_json

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open


RUN_AGAIN = "make the run again"
# Bytes of a file that is read as a whole, and how many of those stay open.
_SMALL, _OPEN = 1 << 22, 64
_CURES = {
    errno.ENOSPC: "free some disk space",
    # A quota, and a limit on the size of files.
    errno.EDQUOT: "free some disk space",
    errno.EFBIG: "free some disk space",
    errno.EROFS: "mount the disk for writing",
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
    errno.ENOENT: "check that its folder is still there",
    errno.ENOTDIR: "move the file away that stands where a folder should be",
}
# As safetensors says what the system said.
_NUMBER = re.compile(r"\(os error (\d+)\)")


# What Git LFS leaves in place of a file that it did not fetch begins so.
_POINTER = b"version https://git-lfs.github.com/spec/"


def is_pointer(path: Path) -> bool:
    """Say whether a file that can be read is a pointer of Git LFS to what should stand there."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def refuse_pointer(path: Path) -> None:
    """Raise UserError for a pointer of Git LFS: nothing is damaged, it was not fetched."""
    if is_pointer(path):
        raise UserError(
            f"{path.name} is a pointer of Git LFS, and not the file itself",
            "type 'git lfs pull' in its folder.",
        )


def is_there(path: Path) -> bool:
    """Say whether anything is at a path that somebody typed, which may be too long to be one."""
    # `Path.exists` raises for what the system refuses to look at.
    return os.path.exists(path)  # noqa: PTH110


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; move it to ``path``, synced, only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        # mkstemp makes private files; artifacts are read by the UI's user too.
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text so that a crash leaves the old file or the new one, never half of it."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def expanded(path: str | Path) -> Path:
    """Return a path with its ``~`` expanded; that of a user whom nobody knows stays as it is."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def text_digest(text: str) -> str:
    """Return the BLAKE3 hash of a text's UTF-8 bytes, as hex."""
    return blake3(text.encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the BLAKE3 hash, as hex, of the bytes in row-major order of any tensor on the CPU."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return blake3(flat.numpy().data).hexdigest()


def inside(folder: Path, name: str, cure: str = RUN_AGAIN) -> Path:
    """Return the path of a file that a manifest names. Raises UserError outside its folder."""
    path = folder / name
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError) as error:
        # No name at all, too long a one, or a link that leads to itself.
        raise UserError(
            f"The manifest in {folder} names a file that cannot be ({name[:80]!r})", f"{cure}."
        ) from error
    if not is_inside:
        raise UserError(
            f"The manifest in {folder} names a file outside its folder ({name})", f"{cure}."
        )
    return path


class DamagedError(UserError):
    """What is said of a file that does not hold what it should; ``path`` and ``why`` keep it."""

    def __init__(self, path: Path, why: str, cure: str) -> None:
        super().__init__(f"{path} is damaged ({why})", cure)
        self.path, self.why = path, why


def damaged(path: Path, why: object, cure: str = RUN_AGAIN) -> DamagedError:
    """Return what is said of a file that does not hold what it should: one line, with the cure."""
    return DamagedError(path, " ".join(str(why).split()), f"{cure}.")


@contextmanager
def reading(path: Path, cure: str = RUN_AGAIN) -> Iterator[None]:
    """Raise UserError where a file that is read inside is missing, unreadable or damaged."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing", f"{cure}.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", f"{cure}.") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, error, cure) from error


def disk_cure(error: Exception) -> str:
    """Return what helps where the system refused to write a file."""
    said = _NUMBER.search(str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    return _CURES.get(number or 0, "check the disk")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError where the disk refuses what is written inside."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be written ({why})", f"{disk_cure(error)}.") from error


def read_json(path: Path, kind: Any, cure: str = RUN_AGAIN) -> Any:
    """Return a JSON file as a type, such as ``dict[str, float]``. Raises UserError."""
    with reading(path, cure):
        return decode(kind, parse_json(path.read_text(encoding="utf-8")))


def read_tensor(path: Path, key: str, cure: str = RUN_AGAIN) -> torch.Tensor:
    """Return one tensor, mapped from its file, in its stored shape and dtype, on the CPU.

    Raises UserError; see `reading`.
    """
    return read_tensors(path, [key], cure)[key]


def read_tensors(
    path: Path, keys: Iterable[str] | None = None, cure: str = RUN_AGAIN
) -> dict[str, torch.Tensor]:
    """Return a file's tensors by name, all unless named, in their stored shapes and dtypes.

    Raises UserError where one is not there; see `reading`.
    """
    with _opened(path, cure) as file:
        names = file.keys()
        wanted = list(names if keys is None else keys)
        absent = sorted(set(wanted) - set(names))
        if absent:
            raise damaged(path, f"it holds no tensor '{absent[0]}'", cure)
        return {key: file.get_tensor(key) for key in wanted}


class TensorFiles:
    """The tensors of a folder's files, one by one; small files are opened once for all of theirs.

    A file of many small tensors costs more to open, and its header to parse, than they to read.
    """

    def __init__(self, where: Path | Callable[[str, str], Path]) -> None:
        """``where`` is the folder, or returns the file that holds a tensor, given both names."""
        self._where = where
        self._opened = lru_cache(_OPEN)(self._open)
        self._held: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def read(self, file: str, name: str) -> tuple[Path, torch.Tensor]:
        """Return a file's path, and one of its tensors, mapped, in its stored shape and dtype.

        Raises UserError where it is not there; see `reading`.
        """
        held = self._held.get(file)
        if held is None or name not in held[1]:
            # To find out where a file lies takes longer than to read a small tensor of it.
            where = self._where
            held = self._opened(Path(file) if isinstance(where, Path) else where(file, name))
            if len(self._held) >= _OPEN:
                self._held.clear()
            self._held[file] = held
        path, tensors = held
        return path, tensors[name] if name in tensors else read_tensor(path, name)

    def _open(self, place: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        """Return a file's path, and all of its tensors, mapped, where it is a small one."""
        path = inside(self._where, str(place)) if isinstance(self._where, Path) else place
        with reading(path):
            small = path.stat().st_size <= _SMALL
        return path, read_tensors(path) if small else {}


def tensor_shapes(path: Path, cure: str = RUN_AGAIN) -> dict[str, list[int]]:
    """Return the shapes of a file's tensors by name. Raises UserError; see `reading`."""
    with _opened(path, cure) as file:
        names: list[str] = list(file.keys())
        return {name: file.get_slice(name).get_shape() for name in names}


def file_notes(path: Path, cure: str = RUN_AGAIN) -> dict[str, str]:
    """Return what a file of tensors says beside them. Raises UserError; see `reading`."""
    with _opened(path, cure) as file:
        return dict(file.metadata() or {})


@contextmanager
def _opened(path: Path, cure: str) -> Iterator[safe_open]:
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path, cure), safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise damaged(path, error, cure) from error
