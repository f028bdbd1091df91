"""KeptTokens: which tokens of its prompts a run keeps at a site, where it does not keep all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KeptTokens:
    """The ``columns`` of prompts, padding included, that are ``width`` tokens wide; in order.

    Without columns all are kept. What a stage is fed, and what was chosen, is kept whole.
    """

    columns: tuple[int, ...] = ()
    width: int = 0

    def __bool__(self) -> bool:
        return bool(self.columns)

    def of(self, shown: torch.Tensor) -> torch.Tensor:
        """Return the kept tokens of [batch, token, ...], whether or not it has others, too."""
        return self.cut(shown) if self and shown.shape[1] == self.width else shown

    def cut(self, tensor: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Return the kept tokens of a tensor whose ``axis`` is that of tokens, a copy."""
        import torch

        return tensor.index_select(axis, torch.tensor(self.columns, device=tensor.device))


def chosen_columns(
    real: Sequence[Sequence[bool]], count: int, lengths: Sequence[int]
) -> KeptTokens:
    """Return so many tokens of prompts: the first, the last, those about ``lengths``, and others.

    ``real`` says of each row which of its tokens is no padding. A quarter each goes to the first,
    to the last, and to those where a prompt becomes so long that the model does something else;
    the rest is spread evenly. All are kept where there are no more.
    """
    width = len(real[0])
    if count >= width:
        return KeptTokens()
    starts = [row.index(True) for row in real]
    ends = [width - row[::-1].index(True) for row in real]
    share = max(count // 4 // len(real), 1)
    of_rows = []
    for start, end in zip(starts, ends, strict=True):
        edges = [start + length - 1 for length in lengths if length <= end - start]
        about = max(share // max(len(edges), 1), 2)
        near = [column for at in edges for column in range(at - about // 2, at + about // 2)]
        ends_of = [each for n in range(share) for each in (end - 1 - n, start + n)]
        of_rows.append([each for each in (*ends_of, *near) if start <= each < end])
    # Each row's first, before any row's second.
    turns = (each for turn in zip_longest(*of_rows) for each in turn if each is not None)
    kept = list(dict.fromkeys(turns))[:count]
    rest = sorted({*range(min(starts), max(ends))} - {*kept}) or [*range(width)]
    left = count - len(kept)
    # In the middle of as many stretches of equal length.
    kept += [rest[(2 * n + 1) * len(rest) // (2 * left)] for n in range(left)]
    return KeptTokens(tuple(sorted({*kept})), width)
