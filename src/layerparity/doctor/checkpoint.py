"""The checkpoint: its config.json, the headers of its files, their sizes, and its disk's speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.console import bytes_text
from layerparity.doctor._reading import speed_of_file
from layerparity.doctor.base import Check, Result, Section, ok, warning
from layerparity.models.resolve import open_checkpoint

if TYPE_CHECKING:
    from layerparity.config import Config
    from layerparity.models.checkpoint import Checkpoint

SAMPLE = 256 << 20
# A shorter read says more of the first access than of the disk.
_WORTH_READING = 64 << 20
_SLOW = 200e6


def look(config: Config) -> Iterator[Result]:
    """Yield a line for the files and one for their disk. What is damaged raises UserError."""
    if config.model.path is None and config.model.shipped is None and config.model.architecture:
        found = f"model={config.model.name} is an architecture without weights"
        yield ok("checkpoint", found, "model.path=FOLDER looks at its weights too")
        return
    checkpoint = open_checkpoint(config.model)
    yield ok("checkpoint", _found(checkpoint))
    largest = max(_files(checkpoint), key=lambda file: file.stat().st_size)
    if largest.stat().st_size >= _WORTH_READING:
        yield _speed(largest)


def _found(checkpoint: Checkpoint) -> str:
    config, stored = checkpoint.config, checkpoint.tensors.values()
    files = len(_files(checkpoint))
    size = bytes_text(sum(each.bytes for each in stored))
    layers = config.get("num_hidden_layers", "?")
    where = f"{files} files" if files > 1 else "1 file"
    dtypes = ", ".join(sorted({each.dtype for each in stored}))
    kind = config.get("model_type", "no model_type")
    return f"{kind}, {layers} layers, {len(stored)} tensors in {where}, {size} ({dtypes})"


def _files(checkpoint: Checkpoint) -> set[Path]:
    return {stored.file for stored in checkpoint.tensors.values()}


def _speed(file: Path) -> Result:
    speed = speed_of_file(file, SAMPLE)
    found = f"reads {speed / 1e9:.2f} GB/s from {file.name}"
    if speed < _SLOW:
        cure = "copy the checkpoint to a local disk"
        return warning("checkpoint speed", f"{found}: loading will wait for it", cure)
    return ok("checkpoint speed", found)


CHECK = Check(Section.FILES, look)
