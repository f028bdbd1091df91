"""Tensor files: safetensors opened and read in one place, with damage said in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.errors import UserError

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open

RUN_AGAIN = "make the run again"


def read_tensor(path: Path, key: str, cure: str = RUN_AGAIN) -> torch.Tensor:
    """Return one tensor, mapped from its file. Raises UserError, which ends in the cure."""
    return read_tensors(path, [key], cure)[key]


def read_tensors(
    path: Path, keys: Iterable[str] | None = None, cure: str = RUN_AGAIN
) -> dict[str, torch.Tensor]:
    """Return tensors of a file by name, all of them unless named. Raises UserError."""
    with _opened(path, cure) as file:
        held = file.keys()
        wanted = list(held if keys is None else keys)
        absent = sorted(set(wanted) - set(held))
        if absent:
            raise UserError(f"{path} holds no tensor '{absent[0]}': it is damaged; {cure}.")
        return {key: file.get_tensor(key) for key in wanted}


def tensor_names(path: Path, cure: str = RUN_AGAIN) -> list[str]:
    """Return the names of a file's tensors. Raises UserError."""
    with _opened(path, cure) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path, cure: str) -> Iterator[safe_open]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}): {cure}.") from error
