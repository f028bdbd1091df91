"""A GGUF file as the checkpoint that it was made from: its tensors by their published names.

llama.cpp's names are the `gguf` package's map. A stack of experts is cut into those that the
architecture publishes one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.model.adapter import LoraAdapter
from layerparity.model.checkpoint import CONFIG, Checkpoint, read_json
from layerparity.model.gguf_file import GgufFile, read_gguf
from layerparity.model.gguf_keys import (
    BESIDE,
    ROPE_FACTORS,
    SIZES,
    TABLE,
    GgufArchitecture,
    architecture_of,
    config_of,
)
from layerparity.model.gguf_layout import OTHER, GgufLayout, can_decode, row_bytes
from layerparity.model.header import Header, Stored, stamp
from layerparity.model.packed import NUMBERS, PackedWeight
from layerparity.model.packing import Unpacked
from layerparity.model.wrapped import TEXT, is_wrapped, text_values

if TYPE_CHECKING:
    from gguf import TensorNameMap

Shape = tuple[int, ...]
_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<after>.*)")
# Of queries and keys, weights and biases; of norms.
_ROTATED = re.compile(r"blk\.\d+\.attn_(?P<which>[qk])\.")
_NORM = re.compile(r".*norm\.weight")
# What alternates with gate in a weight of both, by its place in llama.cpp's name.
_GATE, _UP = "ffn_gate_exps", "ffn_up_exps"
_BOTH, _STACKED = "experts.gate_up_proj", re.compile(r"experts\.(gate_up|down)_proj$")
# What a checkpoint's own tensors hold as they are.
_PLAIN = ("F32", "F16", "BF16", "F64")
# Files that say how text becomes tokens; a file's own vocabulary stands in where there are none.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class GgufCheckpoint(Checkpoint):
    """A GGUF file, or one of a model's numbered ones, with a config.json beside it or without.

    Raises UserError where the file cannot be read, is of an architecture that is not, or of another
    model than config.json.
    """

    def __init__(
        self, file: Path, stages: Sequence[str] | None = None, adapter: Path | None = None
    ) -> None:
        self.place, self.folder, self.stages, self.cure = file, file.parent, stages, "fetch it."
        self.adapter = None if adapter is None else LoraAdapter.of(adapter)
        self.source: GgufFile = read_gguf(file)
        self.architecture: GgufArchitecture = architecture_of(self.source, file.name)
        self._marks = self._marked()

    def is_whole_still(self) -> bool:
        """Say whether no file has changed since it was opened."""
        try:
            changed = any(stamp(each.file.stat()) != each.stamp for each in self.sources)
            return not changed and self._marked() == self._marks
        except OSError:
            return False

    @cached_property
    def index(self) -> dict[str, str]:
        """Empty: every file is there."""
        return {}

    @property
    def missing(self) -> list[str]:
        """Empty: every file is there."""
        return []

    @property
    def tokenizer_home(self) -> Path:
        """The folder of a tokenizer, or the file itself, which has its vocabulary."""
        beside = any((self.folder / name).is_file() for name in _TOKENIZER)
        return self.folder if beside else self.place

    @cached_property
    def said(self) -> dict[str, object]:
        """What config.json says beside the file; without one, what the file's keys say."""
        file = self.folder / CONFIG
        if not file.is_file():
            return config_of(self.source, self.place.name, self._factors)
        said = read_json(file)
        text = text_values(said) if is_wrapped(said) else said
        for key, name in SIZES.items():
            own = self.source.keys.get(f"{self.source.architecture}.{key}")
            if own is not None and text.get(name, own) != own:
                raise UserError(
                    f"{file} says {name} = {text[name]}, and {self.place.name} {own}",
                    "they are not of one model: give each a folder of its own.",
                )
        rows = self.source.tensors[TABLE].shape[0] if TABLE in self.source.tensors else 0
        if rows and text.get("vocab_size", rows + 1) > rows:
            # llama.cpp's converter leaves out rows that are no token's: Gemma 3's last 64.
            holder = said[TEXT] if is_wrapped(said) else said
            holder["vocab_size"] = rows
        return said

    def _factors(self) -> list[float]:
        import torch

        from layerparity.model.filling import Filler
        from layerparity.model.reading import Files

        stored = self.source.tensors[ROPE_FACTORS]
        held = torch.empty(stored.shape, dtype=torch.float32)
        Filler(Files(self.source.stamps), hashing=False).fill(stored, held)
        found: list[float] = held.tolist()
        return found

    @cached_property
    def headers(self) -> list[Header]:
        """Its files, each with its tensors by their published names; of packed ones the parts."""
        parts: dict[Path, list[Stored]] = {file: [] for file in self.source.stamps}
        for each in self._found.values():
            pieces = each.parts.values() if isinstance(each, PackedWeight) else (each,)
            for piece in pieces:
                parts[piece.file].append(piece)
        return [Header(file, mark, parts[file]) for file, mark in self.source.stamps.items()]

    def _unpack(self) -> Unpacked:
        packed = {n: each for n, each in self._found.items() if isinstance(each, PackedWeight)}
        return Unpacked(dict(self._found), packed)

    @cached_property
    def _found(self) -> dict[str, Stored]:
        """Its tensors by published name; those that have none, by their own."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        kind, blocks = kinds[self.source.architecture], self.config["num_hidden_layers"]
        names, found, used = get_tensor_name_map(kind, blocks), {}, {ROPE_FACTORS}
        for name, shape in published(self.config).items():
            sources = [n for n in self._sources(name, names) if n in self.source.tensors]
            if sources and (weight := self._weight(name, shape, sources)):
                used.update(sources)
                found[name] = weight
        others = {n: each for n, each in self.source.tensors.items() if n not in used}
        if others and not (self.folder / CONFIG).is_file():
            # What no key announces may still be computed with.
            raise UserError(
                f"{self.place.name} holds {next(iter(others))}, of which its keys say nothing",
                BESIDE,
            )
        return {**found, **others}

    def _sources(self, name: str, names: TensorNameMap) -> list[str]:
        """Return llama.cpp's names of what a published tensor is made of."""
        expert = _EXPERT.fullmatch(name)
        known = f"{expert['before']}.{expert['after']}" if expert else name
        # What is no weight and no bias of a module, is one by name.
        known = re.sub(r"(correction|proj)_bias$", r"\1.bias", known)
        known = re.sub(r"(\.sinks|_proj)$", r"\1.weight", known)
        both = self.architecture.woven and _BOTH in known
        found = names.get_name(
            known.replace("gate_up_proj", "gate_proj") if both else known, (".weight", ".bias")
        )
        if found is None:
            return []
        return [found, found.replace(_GATE, _UP)] if both else [found]

    def _weight(self, name: str, shape: Shape, sources: Sequence[str]) -> Stored | None:
        """Return a published tensor of a shape; None of an expert that its stack lacks."""
        expert = _EXPERT.fullmatch(name)
        parts = [self.source.tensors[each] for each in sources]
        if expert:
            number = int(expert["number"])
            if number >= parts[0].shape[0]:
                return None
            parts = [_of_expert(each, number) for each in parts]
        stored, own = parts[0], self.architecture
        rotated = _ROTATED.match(stored.name) if own.paired else None
        odd = next((each for each in parts if each.dtype not in _PLAIN), None)
        if odd is not None and not can_decode(odd.dtype):
            raise UserError(
                f"{odd.name} is stored as {odd.dtype}, which the package gguf does not decode",
                "quantise the model to another type.",
            )
        layout = GgufLayout(
            stored.dtype,
            paired=self._head(rotated["which"], stored) if rotated else 1,
            woven=None if len(parts) == 1 else 3 - len(shape),
            less=1.0 if own.raised and _NORM.fullmatch(stored.name) else 0.0,
            turned=own.woven and bool(_STACKED.search(name)),
        )
        if layout == GgufLayout(stored.dtype) and stored.dtype in _PLAIN:
            return replace(stored, name=name, shape=_shaped(stored, shape))
        held = [_in_bytes(each) for each in parts]
        roles = dict(zip((NUMBERS, OTHER), held, strict=False))
        size = sum(each.bytes for each in held)
        found = _whole_shape(stored.shape, layout)
        place = stored.file, stored.dtype, found, size, stored.begin
        return PackedWeight(name, *place, parts=roles, layout=layout)

    def _head(self, which: str, stored: Stored) -> int:
        """Return the rows of a head of queries or keys."""
        heads = int(self.config["num_attention_heads"])
        count = heads if which == "q" else int(self.config.get("num_key_value_heads", heads))
        return max(stored.shape[0] // count, 1)


def published(config: Mapping[str, object]) -> dict[str, Shape]:
    """Return the tensors that a model of config.json's values is published as, and their shapes.

    Raises UserError where transformers makes no such model.
    """
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    skeleton = Skeleton(read_config(config), torch.float32, None, None)
    return {
        name: tuple(piece.shape)
        for weight, tensor in skeleton.model.state_dict().items()
        for name, piece in skeleton.conversion.revert(weight, tensor).items()
    }


def _of_expert(stack: Stored, number: int) -> Stored:
    """Return one matrix of a stack."""
    size = stack.bytes // stack.shape[0]
    name, begin = f"{stack.name}[{number}]", stack.begin + number * size
    return replace(stack, name=name, shape=stack.shape[1:], bytes=size, begin=begin)


def _in_bytes(stored: Stored) -> Stored:
    """Return a tensor whose rows are counted in bytes where its numbers are packed."""
    if stored.dtype in _PLAIN:
        return stored
    *lead, columns = stored.shape
    return replace(stored, shape=(*lead, row_bytes(stored.dtype, columns)))


def _whole_shape(shape: Shape, layout: GgufLayout) -> Shape:
    """Return the shape of a weight that a tensor of a shape is laid out in."""
    sizes = list(shape)
    if layout.woven is not None:
        sizes[layout.woven - 2] *= 2
    if layout.turned:
        sizes[-2:] = sizes[:-3:-1]
    return tuple(sizes)


def _shaped(stored: Stored, shape: Shape) -> Shape:
    """Return the shape that a tensor is published in, where they differ by axes of one alone."""
    bare = [size for size in shape if size != 1]
    return shape if bare == [size for size in stored.shape if size != 1] else stored.shape
