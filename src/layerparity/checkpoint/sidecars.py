"""Copy and write what stands beside a converted checkpoint's shards: index, config, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerparity.checkpoint.shards import PlannedTensor, Shard, Why, weight_map
from layerparity.checkpoint.target import REPORT, ConversionState
from layerparity.ground.errors import UserError
from layerparity.ground.files import whole_file, write_text
from layerparity.model.checkpoint import INDEX, Checkpoint
from layerparity.model.packing import MODELOPT, QUANTIZATION

CONFIG = "config.json"
_SINGLE = "model.safetensors"
# Weights in whatever format, and lists of them: the result has its own.
_WEIGHTS = (".safetensors", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
_TOKENIZER = "tokenizer*.json"
# The cache of Hugging Face keeps files as links to here, seen from a snapshot's folder.
_BLOBS = Path("../../blobs")
_CHANGES = (Why.DEQUANTISED, Why.ADAPTED, Why.ROUNDED, Why.WIDENED)


def files_to_copy(checkpoint: Checkpoint) -> tuple[list[Path], list[str]]:
    """Return the files to copy, and the names of what is left out: folders, pickles, foreign links.

    A link is followed only inside the checkpoint's folder, or to where the Hugging Face cache keeps
    the files of its snapshots. Of a folder that is no model's the tokenizer alone is copied.
    """
    source, copied, omitted = checkpoint.folder, [], []
    if not (source / CONFIG).is_file():
        return sorted(each for each in source.glob(_TOKENIZER) if each.is_file()), []
    homes = (source.resolve(), (source.absolute() / _BLOBS).resolve())
    shards = (stored.file.name for stored in checkpoint.stored.values())
    converted = {INDEX, CONFIG, MODELOPT, REPORT, *shards}
    for path in sorted(source.iterdir()):
        if path.name in converted or path.name.startswith("."):
            continue
        own = any(path.resolve().is_relative_to(home) for home in homes)
        if own and path.is_file() and not path.name.endswith((*_WEIGHTS, *_PICKLES)):
            copied.append(path)
        else:
            omitted.append(path.name)
    return copied, omitted


def copy(files: Sequence[Path], folder: Path) -> None:
    """Copy files, each whole or not at all. Raises UserError for one that cannot be read."""
    for file in files:
        try:
            opened = file.open("rb")
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}): check the disk.") from error
        with opened, whole_file(folder / file.name) as part, part.open("wb") as copied:
            shutil.copyfileobj(opened, copied)


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
    kept = {key: value for key, value in config.items() if key != QUANTIZATION}
    kept["dtype"] = dtype
    # The name of the same key before transformers 5; other programs still read it.
    if "torch_dtype" in kept:
        kept["torch_dtype"] = dtype
    return json.dumps(kept, indent=2) + "\n"


@dataclass(frozen=True)
class ConversionGroup:
    """Tensors with which the same was done: how many, and their bytes before and after."""

    stored: str
    written: str
    why: Why
    tensors: int
    bytes_stored: int
    bytes_written: int

    @property
    def changes(self) -> bool:
        """Say whether these tensors are converted at all."""
        return self.why in _CHANGES


def groups(shards: Iterable[Shard]) -> list[ConversionGroup]:
    """Return what is done with the tensors, the most bytes first."""
    alike: dict[tuple[str, str, Why], list[PlannedTensor]] = {}
    for shard in shards:
        for each in shard.tensors:
            alike.setdefault((each.stored.dtype, each.dtype, each.why), []).append(each)
    rows = []
    for (stored, written, why), tensors in alike.items():
        before, after = sum(t.source_bytes for t in tensors), sum(t.bytes for t in tensors)
        rows.append(ConversionGroup(stored, written, why, len(tensors), before, after))
    return sorted(rows, key=lambda group: -group.bytes_written)


def report(shards: Sequence[Shard], state: ConversionState) -> str:
    """Return JSON of the groups, of every tensor that was not copied, and of the origin."""
    tensors = (each for shard in shards for each in shard.tensors)
    changed = {
        each.name: {"from": each.stored.dtype, "to": each.dtype, "why": each.why}
        for each in tensors
        if each.why is not Why.AS_STORED
    }
    return json.dumps(
        {
            "groups": [asdict(group) for group in groups(shards)],
            "tensors": changed,
            "origin": state.to_dict(),
        },
        indent=1,
    )
