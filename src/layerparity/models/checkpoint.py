"""Checkpoint: a Hugging Face folder of safetensors, read by header first, by tensor on demand."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.errors import UserError
from layerparity.files import sha256_text, tensor_sha256
from layerparity.tensor_files import read_tensors

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HEADER_LIMIT = 100 * 2**20
# Keys that say where or how a config was written, not what the architecture is.
_CONFIG_NOISE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True)
class Stored:
    """Where one tensor of a checkpoint lies: file, dtype as safetensors names it, shape, bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Checkpoint:
    """A folder with config.json and safetensors. Nothing but headers is read until `read`.

    Raises UserError where the folder is missing, holds pickles only, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"No checkpoint folder at {folder}: give model.path=<folder>.")
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json: it is not a Hugging Face model folder.")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it stands."""
        return _read_json(self.folder / "config.json")

    @cached_property
    def config_sha256(self) -> str:
        """Hash of the architecture: config.json without the keys that do not describe it."""
        return config_sha256(self.config)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor of the checkpoint by its stored name, from the headers alone."""
        found: dict[str, Stored] = {}
        for file in self._files():
            for stored in read_header(file):
                if stored.name in found:
                    raise UserError(
                        f"{stored.name} stands in {found[stored.name].file.name} and in {file.name}"
                    )
                found[stored.name] = stored
        return found

    def read(self, names: Iterable[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return tensors by name as stored, on the CPU, and the SHA-256 of each one's bytes."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self.tensors[name].file, []).append(name)
        values: dict[str, torch.Tensor] = {}
        for file, group in wanted.items():
            values.update(read_tensors(file, group, "fetch it again"))
        return values, {name: tensor_sha256(value) for name, value in values.items()}

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            return self._indexed(_read_json(index))
        files = sorted(self.folder.glob("*.safetensors"))
        if files:
            return files
        if any(any(self.folder.glob(pattern)) for pattern in _PICKLES):
            raise UserError(
                f"{self.folder} holds a pickle checkpoint, which is never opened: "
                "convert it to safetensors first (model.save_pretrained writes them)."
            )
        raise UserError(f"{self.folder} holds no .safetensors file: give another model.path.")

    def _indexed(self, index: dict[str, Any]) -> list[Path]:
        weight_map: Mapping[str, str] = index.get("weight_map", {})
        files = [self.folder / name for name in sorted(set(weight_map.values()))]
        outside = [file for file in files if file.parent != self.folder]
        if outside:
            raise UserError(f"{INDEX} names a file outside its folder: {outside[0].name}.")
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(f"{INDEX} names {missing[0]}, which is not in {self.folder}: fetch it.")
        held = {stored.name for file in files for stored in read_header(file)}
        lost = sorted(set(weight_map) - held)
        if lost:
            raise UserError(
                f"{INDEX} names {lost[0]}, which no shard holds: fetch the shard again."
            )
        return files


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of an architecture given as config.json's values."""
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return sha256_text(json.dumps(kept, sort_keys=True, default=str))


def read_header(file: Path) -> list[Stored]:
    """Return what a safetensors file's header lists. Raises UserError where it cannot be true."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size):
            raise UserError(
                f"{file.name} is not a safetensors file, or is cut off: fetch it again."
            )
        raw = opened.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        stored = [_stored(file, name, entry) for name, entry in header.items()]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file.name} has a damaged header: fetch it again.") from error
    if 8 + length + end != size:
        raise UserError(
            f"{file.name} is {size} bytes but its header describes {8 + length + end}: "
            "it is cut off or damaged; fetch it again."
        )
    return stored


def _stored(file: Path, name: str, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(name, file, entry["dtype"], tuple(entry["shape"]), end - begin)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object.")
    return value
