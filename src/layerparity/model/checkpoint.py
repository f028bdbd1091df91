"""Open a Hugging Face folder of safetensors: headers first, tensors on demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import EMBEDDING, HEAD
from layerparity.ground.errors import UserError
from layerparity.ground.files import refuse_pointer
from layerparity.ground.parse import parse_json
from layerparity.model import weight_types
from layerparity.model.adapter import CONFIG as ADAPTER
from layerparity.model.adapter import LoraAdapter
from layerparity.model.architecture import usual_names, with_sizes
from layerparity.model.config_digest import config_digest
from layerparity.model.contradiction import contradiction
from layerparity.model.header import Header, Stamp, Stored, read_header, stamp
from layerparity.model.packed import PackedWeight
from layerparity.model.packing import MODELOPT, QUANTIZATION, Unpacked, of_modelopt, unpack
from layerparity.model.stage_names import StageNames, stage_of_name
from layerparity.model.wrapped import (
    as_causal,
    is_wrapped,
    text_header,
    text_index,
    text_name,
    text_values,
)

if TYPE_CHECKING:
    import torch

    from layerparity.model.filling import Filler
    from layerparity.model.reading import Files
    from layerparity.model.tensor_hashes import TensorHashes

INDEX = "model.safetensors.index.json"
_SAFETENSORS = "*.safetensors"
CONFIG = "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint:
    """A folder with config.json and safetensors. Nothing but headers is read until `read`.

    ``place`` is what was opened, ``folder`` where it lies.

    ``stages`` are those whose weights are needed; files that hold none of theirs may be missing.
    None: all are needed. ``cure`` is what brings a missing file, ``adapter`` the folder of what is
    added to its weights. Raises UserError where the folder is missing, holds pickles only,
    or a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        stages: Sequence[str] | None = None,
        cure: str = "fetch it.",
        adapter: Path | None = None,
    ) -> None:
        self.place = self.folder = folder
        self.stages, self.cure = stages, cure
        self.adapter = None if adapter is None else LoraAdapter.of(adapter)
        if not folder.is_dir():
            raise UserError(f"No checkpoint folder at {folder}", "give model.path=<folder>.")
        if not (folder / CONFIG).is_file():
            raise UserError(
                f"{folder} has no config.json: it is not a Hugging Face model folder",
                "give another model.path.",
            )
        self._marks = self._marked()

    def is_whole_still(self) -> bool:
        """Say whether all tensors were listed, with none absent, and no file has changed since."""
        if "stored" not in vars(self) or self.absent:
            return False
        read = {header.file for header in self.headers}
        try:
            changed = any(stamp(each.file.stat()) != each.stamp for each in self.sources)
            here = read if self.index else set(self.folder.glob(_SAFETENSORS))
            return not changed and here == read and self._marked() == self._marks
        except OSError:
            return False

    def _marked(self) -> list[Stamp | None]:
        """Return what tells settings and the index from the same files after a change."""
        own = [self.adapter.folder / ADAPTER] if self.adapter else []
        files = (self.folder / CONFIG, self.folder / MODELOPT, self.folder / INDEX, *own)
        return [stamp(file.stat()) if file.is_file() else None for file in files]

    @cached_property
    def said(self) -> dict[str, object]:
        """config.json as it is; how it is quantised may stand in a file of ModelOpt's beside it."""
        said, beside = read_json(self.folder / CONFIG), self.folder / MODELOPT
        text = text_values(said) if is_wrapped(said) else said
        if beside.is_file() and QUANTIZATION not in text:
            said[QUANTIZATION] = of_modelopt(read_json(beside))
        return said

    @cached_property
    def written(self) -> dict[str, Any]:
        """config.json, its sizes under their usual names."""
        return usual_names(self.said if is_wrapped(self.said) else as_causal(self.said))

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says of the text model, which may stand in it as a part."""
        return with_sizes(text_values(self.written)) if self.is_wrapped else self.written

    @property
    def is_wrapped(self) -> bool:
        """Whether the text model stands beside others, whose tensors are left out."""
        return is_wrapped(self.written)

    @cached_property
    def config_digest(self) -> str:
        """Hash of the architecture: config.json without the keys that do not describe it."""
        return config_digest(self.config)

    @property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor by name, from the headers alone; a packed weight in place of its parts."""
        return self.unpacked.tensors

    @cached_property
    def unpacked(self) -> Unpacked:
        """What is stored, with the packed weights put together; a part may lie in an absent file.

        Raises UserError for a quantization that is not read, or an adapter that does not fit.
        """
        found = self._unpack()
        if self.adapter is None:
            return found
        # What config.json does not say, an architecture may take for granted.
        known = {*found.tensors, *self.absent}
        apart = any(stage_of_name(name) == HEAD for name in known)
        tied = not apart or self.config.get("tie_word_embeddings", True) is not False
        own_name = text_name if self.is_wrapped else str
        return self.adapter.merged(found, own_name, self.absent, tied=tied)

    def _unpack(self) -> Unpacked:
        return unpack(self.config, self.stored, self.absent)

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Every tensor as it is stored, by its name."""
        tensors: dict[str, Stored] = {}
        for header in self.headers:
            for stored in header.tensors:
                # Two shards with one name may be of two downloads: either could be the right one.
                first = tensors.setdefault(stored.name, stored)
                if first is not stored:
                    files = f"{first.file.name} and in {header.file.name}"
                    raise UserError(f"{stored.name} stands in {files}", "fetch both again.")
        return tensors

    @cached_property
    def headers(self) -> list[Header]:
        """What its files say of themselves, read once, with each file's stamp of that moment."""
        headers = [read_header(file) for file in self._shards()]
        headers = [text_header(each) for each in headers] if self.is_wrapped else headers
        here = {header.file.name for header in headers}
        # Shards of stages that are not needed may be missing, so only those here are looked at.
        due = {name for name, file in self.index.items() if file in here}
        lost = sorted(due - {each.name for header in headers for each in header.tensors})
        if lost:
            raise UserError(
                f"{INDEX} names {lost[0]}, which no shard holds", "fetch the shard again."
            )
        return headers

    @cached_property
    def index(self) -> dict[str, str]:
        """The file of every tensor of the text model as the index names it; empty without one."""
        path = self.folder / INDEX
        if not path.is_file():
            return {}
        named = read_json(path).get("weight_map") or {}
        if not isinstance(named, dict) or {type(file) for file in named.values()} != {str}:
            raise UserError(f"{INDEX} has no weight_map of tensors to files", "fetch it again.")
        return text_index(named) if self.is_wrapped else named

    @property
    def missing(self) -> list[str]:
        """The files that are needed and not here, by name; a pattern where none is known."""
        needed = sorted({file for name, file in self.index.items() if self._needs(name)})
        if not needed and not any(self.folder.glob(_SAFETENSORS)):
            return [_SAFETENSORS]
        return [name for name in needed if not _is_file(self.folder / name)]

    def _needs(self, name: str) -> bool:
        """Say whether the stages need a tensor, by its name: what is of none of them, all do."""
        if self.stages is None:
            return True
        stage = stage_of_name(name)
        tied = stage == EMBEDDING and HEAD in self.stages and self._tied
        return stage is None or stage in self.stages or tied

    @cached_property
    def _tied(self) -> bool:
        return not any(stage_of_name(name) == HEAD for name in self.index)

    @cached_property
    def absent(self) -> frozenset[str]:
        """The tensors of the index whose files are not here, and not needed."""
        return frozenset(self.index) - frozenset(self.stored)

    def of_stage(self, stage: str) -> list[str]:
        """Return the stored weights of a stage, such as ``layers.3``, by their names.

        Of a head that is stored nowhere, those of the embedding, which it is tied to.
        """
        return self._names.of(stage)

    @cached_property
    def _names(self) -> StageNames:
        return StageNames(self.tensors, self.config)

    def refuse_other_sizes(self) -> None:
        """Raise UserError where config.json has a size far beyond what the checkpoint holds."""
        if self._misfit:
            raise UserError(
                f"{self.folder / 'config.json'} has {self._misfit}",
                "they are not of one model; fetch both again.",
            )

    @cached_property
    def _misfit(self) -> str:
        return contradiction(self.config, self.tensors, len(self.absent))

    @property
    def has_weights(self) -> bool:
        """Whether every file of it is there, with a header that can be read."""
        try:
            return bool(self.stored)
        except UserError:
            return False

    @cached_property
    def files(self) -> Files:
        """Its files, for positioned reads."""
        from layerparity.model.reading import Files

        return Files({header.file: header.stamp for header in self.sources})

    @property
    def tokenizer_home(self) -> Path:
        """Where the tokenizer is read from."""
        return self.folder

    @property
    def sources(self) -> list[Header]:
        """What every file that is read says of itself, an adapter's too."""
        return [*self.headers, *([self.adapter.header] if self.adapter else [])]

    def read(self, names: Iterable[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return tensors by name, on the CPU, and the hash of each one's bytes.

        In the stored shape and dtype, but packed weights with their values in the checkpoint's own.
        """
        from layerparity.model.filling import Filler

        filler = Filler(self.files)
        values, hashes = {}, {}
        for name in names:
            values[name] = self.empty(name)
            filled = self.fill(filler, name, values[name])
            assert filled is not None
            hashes[name] = filled.stored
        return values, hashes

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor as `read` does, in its shape; in ``dtype`` if given, without hash."""
        from layerparity.model.filling import Filler

        into = self.empty(name, dtype)
        self.fill(Filler(self.files, hashing=False), name, into)
        return into

    def empty(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return unfilled CPU memory of a tensor's stored shape, in its own type or ``dtype``.

        Raises UserError for a type that is not read.
        """
        import torch

        from layerparity.model.number_types import DTYPES

        self.unpacked.refuse(name)
        stored = self._named(name)
        if stored.dtype not in DTYPES and not isinstance(stored, PackedWeight):
            raise UserError(
                f"{name} is stored as {stored.dtype}, which is not read",
                "convert the checkpoint to bfloat16 first.",
            )
        return torch.empty(stored.shape, dtype=dtype or self.held_as(name))

    def _named(self, name: str) -> Stored:
        """Return a tensor by its name, or a part of a packed weight by its own."""
        return self.tensors[name] if name in self.tensors else self.stored[name]

    def held_as(self, name: str) -> torch.dtype:
        """Return the type that holds a tensor's values as they are, and that its hash covers."""
        from layerparity.model.number_types import DTYPES

        stored = self._named(name)
        return self.dtype if isinstance(stored, PackedWeight) else DTYPES[stored.dtype]

    def fill(self, filler: Filler, name: str, into: torch.Tensor) -> TensorHashes | None:
        """Fill ``into``, of the stored shape, with a tensor's values, cast to the dtype it has.

        Returns the hashes of what it holds then; None where the filler does not hash.
        """
        stored = self._named(name)
        if isinstance(stored, PackedWeight):
            return filler.fill_packed(stored, into, self.dtype)
        return filler.fill(stored, into)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating type the checkpoint was trained in, which packed weights are widened to."""
        import torch

        found: torch.dtype = getattr(torch, weight_types.own_type(self.config))
        return found

    def _shards(self) -> list[Path]:
        """Return the files that an index names; without any, those of the folder."""
        # The index decides and not the folder, which may hold shards of another download.
        indexed = sorted(set(self.index.values()))
        if not indexed:
            # Opening a pipe would wait for its other end.
            files = sorted(each for each in self.folder.glob(_SAFETENSORS) if not each.is_fifo())
            if not files:
                raise self._no_weights()
            return files
        files = [self.folder / name for name in indexed]
        # An index comes with the checkpoint, and a path in it could lead to any file.
        outside = [file for file in files if file.parent != self.folder]
        if outside:
            raise UserError(
                f"{INDEX} names a file outside its folder ({outside[0].name})",
                "fetch the checkpoint again.",
            )
        if self.missing:
            raise UserError(
                f"{INDEX} names {self.missing[0]}, which is not in {self.folder}", self.cure
            )
        return [file for file in files if self.stages is None or _is_file(file)]

    def _no_weights(self) -> UserError:
        """Return the refusal of a folder without safetensors."""
        if any(any(self.folder.glob(pattern)) for pattern in _PICKLES):
            return UserError(
                f"{self.folder} holds a pickle checkpoint, which is never opened",
                "convert it to safetensors first (model.save_pretrained writes them).",
            )
        found = f"{self.folder} holds no .safetensors file"
        return UserError(found, "give another model.path.")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A name longer than any file's.
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of a checkpoint holds as JSON. Raises UserError where it is no object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError):
            refuse_pointer(path)
        raise UserError(f"{path} cannot be read as JSON ({error})", "fetch it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object", "fetch it again.")
    return value
