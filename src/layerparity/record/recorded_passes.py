"""The passes of a model as they are recorded: tensors cloned as they come, a file a pass.

This needs torch alone: it is imported where engines run, which may lack numpy.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from layerparity import __version__
from layerparity.ground.errors import UserError
from layerparity.record.dump_format import (
    DECODE,
    IDS,
    PASS_FILE,
    PREFILL,
    VERSION,
    DumpDescription,
    DumpedPass,
    description_of,
    tensors_of,
)
from layerparity.record.recorded_operands import operands_of

_NEVER = (
    "it was never called: what runs it passes by its forward (a fused kernel, a compiled or "
    "captured graph), or has no use for it"
)
_TWICE = "one pass calls it more than once"
# How safetensors calls torch's types.
_SAFETENSORS = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_POSITIONS = ("positions", "position_ids")


@dataclass
class _OpenPass:
    """One call of the model: what it was given, and what was seen of it by key.

    ``real`` says which of [row, token] are no padding, None where none is. ``rows`` are numbers of
    tokens where sequences stand one behind the other.
    """

    number: int
    step: int
    ids: torch.Tensor | None
    positions: torch.Tensor | None
    rows: list[int] | None
    real: torch.Tensor | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)
    ended: bool = False


class RecordedPasses:
    """Keeps what hooks see, and writes it. ``now`` is the pass that is kept, None where none is."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        *,
        passes: Container[int] | None,
        rows: Sequence[int] | None,
        splits: Mapping[str, str],
    ) -> None:
        self.now: _OpenPass | None = None
        self.unseen: dict[str, str] = {}
        self._folder, self._rank, self._ranks, self._wanted = folder, rank, ranks, passes
        self._rows, self._splits = list(rows) if rows is not None else None, splits
        self._count = self._step = self._sequences = 0
        self._packed = False
        self._passes: list[DumpedPass] = []
        self._keys: set[str] = set()
        self._dtypes: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._written: list[Path] = []

    def begin(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Begin a pass; the one before it is over."""
        self._close()
        integers = [e for e in args if isinstance(e, torch.Tensor) and not e.is_floating_point()]
        ids = kwargs.get(IDS)
        if not isinstance(ids, torch.Tensor):
            ids = integers.pop(0) if integers else None
        given = next((kwargs[name] for name in _POSITIONS if name in kwargs), None)
        positions = given if isinstance(given, torch.Tensor) else next(iter(integers), None)
        made = self._made(_copied(ids), _copied(positions), kwargs)
        number, self._count = self._count, self._count + 1
        if self._wanted is None or number in self._wanted:
            made.number = number
            self.now = made

    def _made(
        self,
        ids: torch.Tensor | None,
        positions: torch.Tensor | None,
        kwargs: Mapping[str, object],
    ) -> _OpenPass:
        """Return a pass of such tokens, and take note of where the context now stands."""
        shape = ids.shape if ids is not None else _shape(positions, kwargs)
        if positions is not None and positions.shape != shape:
            # One row for all sequences; several axes of places, as of images, are none of ours.
            one = positions.numel() == shape[-1:].numel() and positions.dim() <= len(shape)
            positions = positions.reshape(-1).expand(shape) if one else None
        first = positions is not None and not bool(positions.any())
        alone = shape[-1:] == (1,) if len(shape) > 1 else shape.numel() == self._sequences
        same = alone and (len(shape) == 1 or shape[0] == self._sequences)
        if self._sequences and same and not first:
            self._step += 1
            rows = [1] * self._sequences if self._packed else None
            return _OpenPass(0, self._step, ids, positions, rows, None)
        rows = self._said_rows(shape, positions, kwargs) if len(shape) == 1 else None
        real = _mask(kwargs.get("attention_mask"), shape)
        if real is not None:
            # Sequences of different lengths stand one behind the other: no padding is left.
            rows = [int(count) for count in real.sum(-1)]
        self._packed = rows is not None
        self._step, self._sequences = 0, len(rows) if rows is not None else shape[0]
        return _OpenPass(0, 0, ids, positions, rows, real)

    def _said_rows(
        self, shape: torch.Size, positions: torch.Tensor | None, kwargs: Mapping[str, object]
    ) -> list[int]:
        """Return how many tokens each of the sequences has that stand one behind the other."""
        total = shape.numel()
        told = [self._rows] if self._rows is not None else list(_lengths(kwargs))
        for rows in told:
            if sum(rows) == total:
                return rows
        if self._rows is not None:
            said = f"rows= are {sum(self._rows)} tokens, and the model was given {total}"
            raise UserError(said, "give the numbers of tokens of each sequence of the prefill.")
        # Where positions do not go on, another sequence begins, or a piece of one.
        jumps = positions.diff() != 1 if positions is not None else torch.zeros(0)
        starts = jumps.nonzero().flatten() + 1
        ends = [0, *map(int, starts), total]
        return [end - start for start, end in pairwise(ends)]

    def see(self, name: str, end: str, tensor: torch.Tensor | None) -> None:
        """Keep a copy of a module's tensor: engines use its memory again."""
        key = f"{name}.{end}"
        if self.now is None or tensor is None:
            return
        if key in self.now.tensors:
            self.now.twice.add(key)
            return
        self.now.tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def note(self, text: str) -> None:
        """Note once what is to be known of the recording."""
        self._notes[text] = None

    def end(self) -> None:
        """Take what was seen off the device. What the engine computes behind it belongs to it."""
        if self.now is not None:
            self.now.ended = True
            self.now.tensors = {key: each.cpu() for key, each in self.now.tensors.items()}

    def _close(self) -> None:
        """Write the pass that is over; one that was broken off is left out."""
        made, self.now = self.now, None
        if made is None:
            return
        if not made.ended:
            self.note(f"the engine broke pass {made.number} off, which is left out")
            return
        tensors = {k: _laid(each.cpu(), made) for k, each in made.tensors.items()}
        for key in made.twice:
            del tensors[key]
            self.unseen[key] = _TWICE
        self._keys |= tensors.keys()
        self._dtypes.update(
            _name(each.dtype) for each in tensors.values() if each.is_floating_point()
        )
        if made.ids is not None:
            tensors[IDS] = _laid(made.ids, made)
        file = tensors_of(made.number, self._rank)
        with self._whole(file) as part:
            _write(part, tensors)
        ids, positions = (_by_row(each, made) for each in (made.ids, made.positions))
        phase = DECODE if made.step else PREFILL
        self._passes.append(DumpedPass(file, phase, made.step, ids, positions, made.rows))

    def finish(self, model: nn.Module, ends: Mapping[str, Sequence[str]]) -> None:
        """Write the last pass, and what makes the folder whole.

        Raises UserError where nothing was seen.
        """
        self._close()
        wanted = [(name, end) for name, own in ends.items() for end in own]
        lost = [f"{name}.{end}" for name, end in wanted if f"{name}.{end}" not in self._keys]
        if not self._keys:
            what = "none of its modules was" if self._passes else "it was not"
            raise UserError(
                f"{type(model).__name__} was recorded, and {what} called",
                "record the very module that the engine calls, eagerly (no CUDA graphs, no "
                "torch.compile), and passes (passes=) that there are.",
            )
        engine, version = _engine(model)
        made = DumpDescription(
            VERSION,
            __version__,
            engine,
            version,
            str(torch.__version__),
            max(self._dtypes, key=self._dtypes.__getitem__, default=""),
            self._rank,
            self._ranks,
            self._split_keys(),
            self._passes,
            _ends_of(self._keys),
            {key: self.unseen.get(key, _NEVER) for key in lost},
            list(self._notes),
            operands_of(model),
        )
        with self._whole(description_of(self._rank)) as part:
            part.write_text(json.dumps(asdict(made), indent=1), encoding="utf-8")

    def _split_keys(self) -> dict[str, str]:
        """Return how the ranks hold each key, where that is said. The first pattern counts."""
        found = {}
        for key in sorted(self._keys):
            name, _, end = key.rpartition(".")
            said = [how for pattern, how in self._splits.items() if fnmatchcase(name, pattern)]
            if said and end == "out":
                found[key] = said[0]
        return found

    def discard(self) -> None:
        """Remove what was written: a recording that did not end is none."""
        self.now = None
        for path in self._written:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    @contextmanager
    def _whole(self, name: str) -> Iterator[Path]:
        """Yield a path to write to, and rename it when that is done."""
        path = self._folder / name
        part = path.with_name(f".{name}.part")
        self._written += [part, path]
        yield part
        part.replace(path)


def empty_folder(folder: Path, rank: int) -> Path:
    """Make a folder, and return it. Raises UserError where this rank recorded into it before."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        found = PASS_FILE.fullmatch(path.name)
        own = int(found[1]) == rank if found else path.name == description_of(rank)
        if own:
            raise UserError(
                f"{folder} holds {path.name} of an earlier recording", "give an empty folder (to=)."
            )
    return folder


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.int64, copy=True)


def _shape(positions: torch.Tensor | None, kwargs: Mapping[str, object]) -> torch.Size:
    """Return [token], or [row, token], of a call without ids."""
    embedded = kwargs.get("inputs_embeds")
    if isinstance(embedded, torch.Tensor):
        return embedded.shape[:-1]
    return positions.shape if positions is not None else torch.Size([1, 0])


def _mask(given: object, shape: torch.Size) -> torch.Tensor | None:
    """Return which of [row, token] are real, where some are not."""
    if not isinstance(given, torch.Tensor) or given.shape != shape or given.is_floating_point():
        return None
    real = given.detach().cpu() != 0
    return None if bool(real.all()) else real


def _lengths(kwargs: Mapping[str, object]) -> Iterator[list[int]]:
    """Yield what arguments say of the lengths of sequences."""
    for name in ("cu_seqlens", "cu_seq_lens_q", "query_start_loc", "seq_lens"):
        given = kwargs.get(name)
        if isinstance(given, torch.Tensor | list | tuple):
            told = [int(each) for each in given]
            ends = pairwise(told)
            yield told if name == "seq_lens" else [end - start for start, end in ends]


def _laid(tensor: torch.Tensor, made: _OpenPass) -> torch.Tensor:
    """Return what has an axis of sequences without it, where these stand one behind the other."""
    if made.rows is None or tensor.dim() < 2:
        return tensor
    count, real = len(made.rows), made.real
    if real is None:
        # A decode step: a token of each row.
        flat = made.step and tensor.shape[:2] == (count, 1)
        return tensor.flatten(0, 1) if flat else tensor
    if tensor.shape[:2] == real.shape:
        return tensor[real]
    if tensor.shape[:1] == (real.numel(),):
        return tensor[real.flatten()]
    return tensor.flatten(0, 1) if tensor.shape[:2] == (count, 1) else tensor


def _by_row(tensor: torch.Tensor | None, made: _OpenPass) -> list[list[int]]:
    """Return ids or positions of each sequence."""
    if tensor is None:
        return []
    laid = _laid(tensor, made)
    rows = laid.flatten().split(made.rows) if made.rows is not None else laid
    return [row.tolist() for row in rows]


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors on the CPU as a .safetensors file, without numpy and a copy of them all."""
    held = {key: tensors[key].contiguous() for key in sorted(tensors)}
    header: dict[str, object] = {}
    at = 0
    for key, each in held.items():
        end = at + each.nbytes
        shape, dtype = list(each.shape), _SAFETENSORS[_name(each.dtype)]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in held.values():
            if each.nbytes:
                file.write((ctypes.c_char * each.nbytes).from_address(each.data_ptr()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ends_of(keys: set[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for key in sorted(keys):
        name, _, end = key.rpartition(".")
        found.setdefault(name, {})[end] = key
    return found


def _engine(model: nn.Module) -> tuple[str, str]:
    """Return the name and the version of the package that a model's class is of."""
    name = type(model).__module__.partition(".")[0]
    try:
        return name, metadata.version(name)
    except metadata.PackageNotFoundError:
        # A build of another name, as vLLM's for CPUs.
        return name, getattr(sys.modules.get(name), "__version__", "")
