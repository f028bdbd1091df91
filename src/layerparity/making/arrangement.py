"""Other layouts of the same tokens: batch size, padding, chunks of the prefill, cache, draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

LEFT, RIGHT = "left", "right"
FIRST, LAST = "first", "last"


class ArrangedPass(NamedTuple):
    """One pass of an arrangement: its places, and what it sees as the cache has it.

    ``mask`` is int64 [sequence, seen place], 1 for real tokens; ``positions`` int64 [sequence,
    place] of its own. What a ``draft`` put into the cache is taken back after it.
    """

    places: slice
    mask: torch.Tensor
    positions: torch.Tensor
    draft: bool


@dataclass(frozen=True)
class Arrangement:
    """Sequences of one pass, or of several with a cache, and where each token stands in the run.

    ``rows`` is int64 [sequence], the run's sequence that each is made of; ``columns`` int64
    [sequence, place], the run's column of each token, -1 for padding that the run has not;
    ``mask`` int64 [sequence, place], 1 for real tokens. The sequences of ``strangers``, bool
    [sequence], stand beside the run's own and are not compared. ``bounds`` are the first place of
    each pass, and the end; ``room`` is the cache's length in tokens, 0 for a pass without a cache.
    ``drafts`` are the numbers of passes that are given up: later ones do not see them.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    mask: torch.Tensor
    strangers: torch.Tensor
    bounds: tuple[int, ...]
    room: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Places of each sequence, padding among them."""
        return int(self.columns.shape[1])

    @property
    def lasting(self) -> torch.Tensor:
        """Places that no draft takes, bool [place]."""
        kept = torch.ones(self.width, dtype=torch.bool)
        for number, (start, end) in enumerate(pairwise(self.bounds)):
            kept[start:end] = number not in self.drafts
        return kept

    @property
    def parts(self) -> Iterator[ArrangedPass]:
        """The passes, in order."""
        lasting = self.lasting
        for number, (start, end) in enumerate(pairwise(self.bounds)):
            seen = torch.cat([lasting[:start], torch.ones(end - start, dtype=torch.bool)])
            mask = self.mask[:, :end][:, seen].contiguous()
            positions = ((mask.cumsum(-1) - 1) * mask).clamp(min=0)[:, start - end :]
            yield ArrangedPass(
                slice(start, end), mask, positions.contiguous(), number in self.drafts
            )

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 [sequence, place]; padding holds 0."""
        return torch.cat([each.positions for each in self.parts], 1)

    def lay(self, value: torch.Tensor, pad: int = 0) -> torch.Tensor:
        """Return the run's values [batch, token, ...] as [sequence, place, ...].

        Padding that the run has not holds ``pad`` where values are ids, else a real token's values:
        zeros would hide that they are used.
        """
        laid = value[self.rows.unsqueeze(1), self.columns.clamp(min=0)]
        if not value.is_floating_point():
            added = self.columns.eq(-1).view(*self.columns.shape, *(1,) * (value.dim() - 2))
            laid = laid.masked_fill(added, pad)
        return laid.contiguous()

    def places_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Return chosen columns of the run, int64 [batch, token, k], as [sequence, place, k]."""
        kept = self.columns[:, self.lasting]
        sequence, place = kept.ge(0).nonzero(as_tuple=True)
        where = torch.full((len(self.rows), columns.shape[1]), -1)
        where[sequence, kept[sequence, place]] = place
        laid = self.lay(columns, -1)
        first = torch.arange(len(self.rows)).view(-1, 1, 1)
        return torch.where(laid < 0, -1, where[first, laid.clamp(min=0)])

    def put_back(self, value: torch.Tensor, into: torch.Tensor) -> None:
        """Write real tokens of [sequence, place, ...] into the run's [batch, token, ...]."""
        own = self.mask.bool() & ~self.strangers.unsqueeze(1) & self.lasting
        sequence, place = own.nonzero(as_tuple=True)
        into[self.rows[sequence], self.columns[sequence, place]] = value[sequence, place]

    def columns_of(self, places: torch.Tensor) -> torch.Tensor:
        """Return chosen places as the run's columns, int64 [sequence, place, k]; -1 is none."""
        first = torch.arange(len(self.rows)).view(-1, 1, 1)
        kept = self.columns[:, self.lasting]
        # A draft chooses among its own places, too, and is not compared.
        found = torch.where(places < 0, -1, kept[first, places.clamp(0, kept.shape[1] - 1)])
        return found.sort(-1).values


def as_it_is(mask: torch.Tensor) -> Arrangement:
    """Return the run's own arrangement; ``mask`` is its attention mask, int64 [batch, token]."""
    batch, tokens = mask.shape
    columns = torch.arange(tokens).expand(batch, tokens)
    beside = torch.zeros(batch, dtype=torch.bool)
    return Arrangement(torch.arange(batch), columns, mask, beside, (0, tokens))


def another(mask: torch.Tensor, width: int) -> Arrangement:
    """Return other texts of ``width`` tokens: each sequence's own backwards, again and again."""
    batch = mask.shape[0]
    texts = [row.nonzero().flatten().flip(0) for row in mask]
    columns = torch.stack([text[torch.arange(width) % len(text)] for text in texts])
    beside = torch.ones(batch, dtype=torch.bool)
    return Arrangement(torch.arange(batch), columns, torch.ones_like(columns), beside, (0, width))


def padded(mask: torch.Tensor, width: int, side: str) -> Arrangement:
    """Return each sequence's real tokens in ``width`` places, padded on a side."""
    batch = mask.shape[0]
    columns = torch.full((batch, width), -1)
    for row in range(batch):
        real = mask[row].nonzero().flatten()
        start = 0 if side == RIGHT else width - len(real)
        columns[row, start : start + len(real)] = real
    beside = torch.zeros(batch, dtype=torch.bool)
    return Arrangement(torch.arange(batch), columns, (columns >= 0).long(), beside, (0, width))


def in_batches(mask: torch.Tensor, size: int, where: str = FIRST) -> list[Arrangement]:
    """Return the sequences in batches of a size, strangers after them, or before where LAST.

    A stranger has a sequence's tokens in the opposite order: another text of the same length.
    """
    own, made = as_it_is(mask), []
    for rows in own.rows.split(size):
        strangers = rows[torch.arange(size - len(rows)) % len(rows)]
        both = (rows, strangers) if where == FIRST else (strangers, rows)
        beside = torch.cat([torch.full((len(each),), each is strangers) for each in both])
        all_rows = torch.cat(both)
        columns = own.columns[all_rows].clone()
        for index in beside.nonzero().flatten().tolist():
            real = mask[all_rows[index]].nonzero().flatten()
            columns[index, real] = real.flip(0)
        made.append(Arrangement(all_rows, columns, mask[all_rows], beside, own.bounds))
    return made


def in_chunks(mask: torch.Tensor, size: int) -> Arrangement:
    """Return the run's arrangement, read by a cache of its length, some tokens at a time."""
    tokens = int(mask.shape[1])
    return replace(as_it_is(mask), bounds=(*range(0, tokens, size), tokens), room=tokens)


def in_steps(mask: torch.Tensor, steps: int, room: int) -> Arrangement:
    """Return the run's arrangement in a cache of ``room`` tokens, the last ``steps`` one by one."""
    tokens = int(mask.shape[1])
    bounds = (0, *range(tokens - steps, tokens + 1))
    return replace(as_it_is(mask), bounds=bounds, room=room)


def with_draft(mask: torch.Tensor, size: int) -> Arrangement:
    """Return the run's arrangement, with a draft of another text's ``size`` tokens in its middle.

    The draft is computed, and given up, as speculation gives up what was guessed wrong.
    """
    own, guessed, tokens = as_it_is(mask), another(mask, size), int(mask.shape[1])
    middle = tokens // 2
    columns, real = (
        torch.cat([one[:, :middle], other, one[:, middle:]], 1)
        for one, other in ((own.columns, guessed.columns), (mask, guessed.mask))
    )
    bounds, room = (0, middle, middle + size, tokens + size), tokens + size
    return Arrangement(own.rows, columns, real, own.strangers, bounds, room, drafts=(1,))
