"""Others: what a checkpoint's folder holds beside its weights, and what of it is taken over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from layerparity.convert.resume import REPORT
from layerparity.convert.shards import Shard, weight_map
from layerparity.errors import UserError
from layerparity.files import whole_file, write_text
from layerparity.models.checkpoint import INDEX, Checkpoint

CONFIG = "config.json"
_SINGLE = "model.safetensors"
# Weights in whatever format, and lists of them: the result has its own.
_WEIGHTS = (".safetensors", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
# The cache of Hugging Face keeps files as links to here, seen from a snapshot's folder.
_BLOBS = Path("../../blobs")


def others(checkpoint: Checkpoint) -> tuple[list[Path], list[str]]:
    """Return the files to copy, and the names of what is left out: folders, pickles, foreign links.

    A link is followed only inside the checkpoint's folder, or to where the Hugging Face cache keeps
    the files of its snapshots.
    """
    source, taken, left = checkpoint.folder, [], []
    converted = {
        INDEX,
        CONFIG,
        REPORT,
        *(stored.file.name for stored in checkpoint.tensors.values()),
    }
    for path in sorted(source.iterdir()):
        if path.name in converted or path.name.startswith("."):
            continue
        copied = path.is_file() and not path.name.endswith((*_WEIGHTS, *_PICKLES))
        if copied and _is_own(path, source):
            taken.append(path)
        else:
            left.append(path.name)
    return taken, left


def copy(files: Sequence[Path], folder: Path) -> None:
    """Copy files, each whole or not at all."""
    for file in files:
        with (
            _readable(file) as opened,
            whole_file(folder / file.name) as part,
            part.open("wb") as copied,
        ):
            shutil.copyfileobj(opened, copied)


def _readable(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): check the disk.") from error


def write_index(checkpoint: Checkpoint, shards: Sequence[Shard], folder: Path) -> None:
    """Write the index of the shards, unless there is but one, by the usual name."""
    indexed = (checkpoint.folder / INDEX).is_file()
    if not indexed and [shard.name for shard in shards] == [_SINGLE]:
        return
    total = sum(shard.tensor_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map(list(shards))}
    write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def converted_config(config: dict[str, Any], dtype: str) -> str:
    """Return config.json's text without its quantization and with the new type."""
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    kept["dtype"] = dtype
    # The name of the same key before transformers 5; other programs still read it.
    if "torch_dtype" in kept:
        kept["torch_dtype"] = dtype
    return json.dumps(kept, indent=2) + "\n"


def _is_own(path: Path, source: Path) -> bool:
    places = (source.resolve(), (source.absolute() / _BLOBS).resolve())
    return any(path.resolve().is_relative_to(place) for place in places)
