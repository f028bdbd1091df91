"""What a site's tensor is made of: a dump's tensors, cut, added up, or taken out of a fused one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerparity.record.dump_files import Dumped, DumpFiles

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from layerparity.anatomy.sizes import ModelSizes

Index = int | slice
# What a fused projection puts out one behind the other.
FUSED = (("q", "k", "v"), ("gate", "up"))


@dataclass(frozen=True)
class Operand:
    """A tensor of a dump, and what is taken of it along its first axes."""

    dumped: Dumped
    index: tuple[Index, ...] = ()

    @property
    def name(self) -> str:
        """What it is called."""
        return self.dumped.names[0] + (f"[{', '.join(map(_told, self.index))}]" * bool(self.index))


@dataclass(frozen=True)
class TensorSource:
    """The sum of some tensors of a dump, or the ``part``-th of what is ``fused`` in it."""

    operands: tuple[Operand, ...]
    fused: tuple[str, ...] = ()
    part: int = 0

    @property
    def name(self) -> str:
        """What it is, in the words of a name map."""
        told = " + ".join(each.name for each in self.operands)
        return f"{self.fused[self.part]} of {told}" if self.fused else told

    @property
    def paths(self) -> list[Path]:
        """The files that it is read from."""
        return [each.dumped.path for each in self.operands]

    def read(self, files: DumpFiles, widths: Widths | None = None) -> torch.Tensor:
        """Return the tensor, of its operands' shape and dtype.

        Raises UserError for a damaged file, and ValueError, with the reason, where its parts do not
        fit together, or nothing says how wide they are.
        """
        whole = _taken(self.operands[0], files)
        for each in self.operands[1:]:
            other = _taken(each, files)
            if other.shape != whole.shape:
                shapes = f"{[*whole.shape]} and {[*other.shape]}"
                raise ValueError(f"what its name map adds up is of the shapes {shapes}")
            # In the engine's own type, which is what it would have added them in.
            whole = whole + other
        if not self.fused:
            return whole
        spans = widths(self.fused, whole.shape[-1]) if widths is not None else ()
        if not spans:
            told = ", ".join(self.fused)
            raise ValueError(f"its {whole.shape[-1]} channels are not {told} of this model")
        start = sum(spans[: self.part])
        return whole[..., start : start + spans[self.part]]


Widths = Callable[[Sequence[str], int], Sequence[int]]


def widths_of(sizes: ModelSizes, ranks: int = 1) -> Widths:
    """Return what says how wide each part of a fused tensor of so many channels is.

    A rank has its own share of the queries' heads, or all channels of all; keys and values have the
    rest, in halves. Empty where that does not fit.
    """
    every = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim

    def widths(parts: Sequence[str], total: int) -> Sequence[int]:
        if tuple(parts) != FUSED[0]:
            return [total // len(parts)] * len(parts) if total % len(parts) == 0 else ()
        queries, over = divmod(sizes.heads * sizes.head_dim, 1 if total == every else ranks)
        rest = total - queries
        fits = not over and rest > 0 and rest % 2 == 0
        return (queries, rest // 2, rest // 2) if fits else ()

    return widths


@dataclass(frozen=True)
class Packed:
    """Sequences of so many tokens, ``rows``, that stand one behind the other in a prefill.

    In a later ``step`` each has one.
    """

    rows: tuple[int, ...]
    step: int = 0

    def at(self, step: int) -> Packed:
        """Return it in a pass: 0 is the prefill."""
        return Packed(self.rows, step)

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [token, ...] as [sequence, token, ...], zeros behind shorter ones.

        A row for each sequence is its last token. What is neither is returned as it is.
        """
        import torch

        count, tokens = len(self.rows), 0 if self.step else sum(self.rows)
        if tokens and tensor.dim() and tensor.shape[0] >= tokens:
            own = tensor[:tokens].split(self.rows)
            return torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True)
        alone = tensor.dim() and tensor.shape[0] >= count
        return tensor[:count].unsqueeze(1) if alone else tensor


@dataclass(frozen=True)
class SiteFiles:
    """What each rank has at one site; ``paths`` are the files that it is read from."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """What it is made of; empty where its files say that."""
        return ""

    def read(self) -> list[torch.Tensor]:
        """Return what each rank has, in their order.

        Raises UserError for a file of no tensor, and ValueError, with the reason, where what the
        files hold is not the site's.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SiteSources(SiteFiles):
    """What each rank has at one site, by what it is made of."""

    sources: tuple[TensorSource, ...]
    files: DumpFiles = field(compare=False)
    widths: Widths | None = field(default=None, compare=False)
    packed: Packed | None = None

    @classmethod
    def of(
        cls,
        sources: Sequence[TensorSource],
        files: DumpFiles,
        widths: Widths | None,
        packed: Packed | None = None,
    ) -> SiteSources:
        """Return what ranks have, and the files that it lies in."""
        paths = (path for each in sources for path in each.paths)
        return cls(tuple(dict.fromkeys(paths)), tuple(sources), files, widths, packed)

    @property
    def name(self) -> str:
        """What the first rank's is made of."""
        return self.sources[0].name

    def read(self) -> list[torch.Tensor]:
        """Return what each rank has, in their order; see `SiteFiles.read`."""
        held = [each.read(self.files, self.widths) for each in self.sources]
        return held if self.packed is None else [self.packed.unpacked(each) for each in held]


def files_of(sources: Iterable[Iterable[TensorSource]]) -> DumpFiles:
    """Return what reads the tensors that all these are made of."""
    held = (each for made in sources for source in made for each in source.operands)
    return DumpFiles({(each.dumped.path, each.dumped.key): each.dumped for each in held})


def _taken(operand: Operand, files: DumpFiles) -> torch.Tensor:
    import torch

    tensor = files.read(operand.dumped)
    if not operand.index:
        return tensor
    try:
        # A slice keeps all of it in memory, and strides that its bytes cannot be seen with.
        return tensor[operand.index].clone(memory_format=torch.contiguous_format)
    except IndexError as error:
        raise ValueError(f"{operand.name} is not in its shape {[*tensor.shape]}") from error


def _told(index: Index) -> str:
    if isinstance(index, int):
        return str(index)
    ends = ("" if end is None else str(end) for end in (index.start, index.stop))
    return ":".join(ends)
