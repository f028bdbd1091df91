"""Dump files: the tensors of a folder of .safetensors and .npy files, by name, read on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.errors import UserError
from layerparity.files import inside
from layerparity.tensor_files import read_tensor, tensor_names

if TYPE_CHECKING:
    import torch

_SUFFIXES = (".npy", ".safetensors")
_CURE = "dump it again"


@dataclass(frozen=True)
class Dumped:
    """One tensor of a dump. ``key`` is its name in a .safetensors file, empty for a .npy.

    ``names`` are what a name map may call it, the fullest first: path and key, or the path alone
    where the file holds nothing else.
    """

    path: Path
    key: str
    names: tuple[str, ...]

    def read(self) -> torch.Tensor:
        """Return the tensor, mapped from its file. Raises UserError where it cannot be read."""
        return read_tensor(self.path, self.key, _CURE) if self.key else _read_npy(self.path)


def find(folder: Path) -> list[Dumped]:
    """Return every tensor under a folder, sorted by file. Raises UserError where there is none."""
    found: list[Dumped] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            found += _in_file(folder, path)
    if not found:
        raise UserError(
            f"{folder} holds no .safetensors or .npy file. Pickles (.pt, .bin) are never opened: "
            "save tensors with safetensors.torch.save_file or numpy.save."
        )
    return found


def _in_file(folder: Path, path: Path) -> list[Dumped]:
    relative = path.relative_to(folder)
    inside(folder, relative.as_posix())
    stem = relative.with_suffix("").as_posix()
    if path.suffix == ".npy":
        return [Dumped(path, "", (stem,))]
    keys = tensor_names(path, _CURE)
    alone = (stem,) if len(keys) == 1 else ()
    return [Dumped(path, key, (f"{stem}/{key}", *alone)) for key in keys]


def _read_npy(path: Path) -> torch.Tensor:
    import numpy as np
    import torch

    try:
        # Copy-on-write: torch wants writable memory, and nobody writes to it.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise UserError(
            f"{path} cannot be read as numbers ({error}). Save it again with numpy.save from a "
            "numeric array; bfloat16 has no .npy form, save that as float32 or as .safetensors."
        ) from error
