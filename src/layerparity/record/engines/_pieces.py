"""Recorded passes that hold pieces of prompts, or sequences that begin and end apart.

Which tokens are whose is told by positions: a piece goes on where its sequence stood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import HEAD, Site
from layerparity.ground.errors import UserError
from layerparity.record.dump_format import PREFILL, DumpedPass
from layerparity.record.engines._requests import (
    ModelPass,
    RequestFiles,
    ServedChunk,
    ServedRequest,
    by_step,
)
from layerparity.record.engines.base import Captures
from layerparity.record.tensor_source import SiteFiles

if TYPE_CHECKING:
    import torch

_CURE = (
    "record one prompt, or one batch, from its first token on (passes=range(...)), without "
    "speculation or recomputed requests"
)
_APART = (
    "give the call cu_seqlens or query_start_loc, or switch chunked prefill and prefix caching off."
)


def goes_on(folder: Path, passes: Sequence[DumpedPass]) -> bool:
    """Say whether passes are one prefill, and decode steps in each of which all sequences go on.

    Raises UserError where they do not begin with one prompt, or one batch, and where nothing says
    what a second prefill is.
    """
    first, *others = passes
    if first.phase != PREFILL:
        raise UserError(f"{folder} begins with decode step {first.step}", f"{_CURE}.")
    if any(row and min(row) > 0 for row in first.positions):
        raise UserError(
            f"{folder} begins behind position 0: what stands before was cached",
            "record the request that it was cached by, too, or switch prefix caching off.",
        )
    for each in others:
        begun = any(row and min(row) > 0 for row in each.positions)
        if each.phase == PREFILL and not (begun and all(own.positions for own in passes)):
            more = "" if each.positions else "; positions of the call tell whether it is a piece"
            raise UserError(f"{folder}: {each.file} is a second prefill", f"{_CURE}{more}.")
    lengths = [len(row) for row in first.positions]
    return all(
        each.phase != PREFILL
        and (not each.positions or each.positions == [[n + each.step - 1] for n in lengths])
        for each in others
    )


def sequences_of(
    folder: Path, passes: Sequence[DumpedPass], heads: Mapping[str, int], ranks: int
) -> tuple[list[ServedRequest], list[str]]:
    """Return the sequences in the order in which they begin, and notes on them.

    Each is a prompt's pieces, and its steps. One that begins where an earlier one had passed has
    been given what that left in a prefix cache: its tokens before are the other's. ``heads`` are
    numbers of rows that logits have, by file. Raises UserError where a piece is missing, and where
    it may be of another sequence.
    """
    found: list[list[ServedChunk]] = []
    begun: list[int] = []
    notes = []
    ids: dict[Path, list[int]] = {}
    # A pass that was left out may have held what seems to have been cached.
    complete = [int(each.file.split("-")[1]) for each in passes] == [*range(len(passes))]
    for each in passes:
        ends = [own[-1].position + own[-1].tokens for own in found]
        where = f"{folder}: {each.file}"
        rows = _rows(where, each, ends, heads.get(each.file), cached=complete)
        names, positions = tuple(str(n) for n, _ in rows), tuple(chain(*each.positions))
        prefill, file = each.phase == PREFILL, Path(each.file)
        of = ModelPass(file, prefill, names, positions, range(ranks), frozenset())
        ids[file] = [*chain(*each.ids)]
        at = 0
        for place, (number, row) in enumerate(rows):
            if number == len(found):
                given, other = _cached(where, found, ids, row[0])
                found.append(given)
                begun.append(len(given))
                if given:
                    notes.append(
                        f"sequence {number} begins at position {row[0]}: what stands before is "
                        f"taken from sequence {other}, as if a prefix cache held that "
                        "(inputs=tokens proves it)"
                    )
            found[number].append(ServedChunk(of, place, at, len(row), row[0]))
            at += len(row)
    pairs = enumerate(zip(found, begun, strict=True))
    return [_sequence(str(number), own, given) for number, (own, given) in pairs], notes


def _cached(
    where: str, found: Sequence[Sequence[ServedChunk]], ids: Mapping[Path, list[int]], tokens: int
) -> tuple[list[ServedChunk], int]:
    """Return the chunks of an earlier sequence that hold so many first tokens, and its number.

    Raises UserError where several hold as many, of different ids.
    """
    if not tokens:
        return [], -1
    held: dict[tuple[int, ...], tuple[list[ServedChunk], int]] = {}
    for number, chunks in enumerate(found):
        own, left = [], tokens
        for chunk in chunks:
            own += [chunk._replace(tokens=min(chunk.tokens, left))] if left > 0 else []
            left -= chunk.tokens
        if left <= 0:
            parts = (ids[e.of.folder][e.first : e.first + e.tokens] for e in own)
            # Without ids each may be another one.
            held.setdefault(tuple(chain(*parts)) or (-1 - number,), (own, number))
    if len(held) > 1:
        raise UserError(
            f"{where} begins at position {tokens}, which {len(held)} sequences of other tokens had "
            "passed: which of them was cached is not known",
            "record fewer prompts, or switch prefix caching and speculation off.",
        )
    return next(iter(held.values()))


def _sequence(name: str, chunks: Sequence[ServedChunk], cached: int) -> ServedRequest:
    """Return a sequence; a last piece of one token is the same as a decode step.

    Behind ``cached`` pieces of another one it computed a piece of its own, however short.
    """
    last = max((n for n, each in enumerate(chunks) if each.tokens > 1), default=0)
    last = max(last, cached) + 1
    return ServedRequest(name, tuple(chunks[:last]), tuple(chunks[last:]))


def _rows(
    where: str, each: DumpedPass, ends: Sequence[int], logits: int | None, *, cached: bool
) -> list[tuple[int, list[int]]]:
    """Return the positions of each sequence in a pass, with its number. Raises UserError.

    ``ends`` say how many tokens each had before it. One may begin where another one had passed, if
    what it left may be ``cached``.
    """
    rows: dict[int, list[int]] = {}
    starts, new = Counter(row[0] for row in each.positions if row), len(ends)
    for row in filter(None, each.positions):
        at = row[0]
        here = [n for n, end in enumerate(ends) if end == at and n not in rows]
        before = next(reversed(rows), None)
        if row != [*range(at, at + len(row))]:
            raise UserError(f"{where} has positions that do not go on one by one", _APART)
        if not at:
            here, new = [new], new + 1
        elif ends.count(at) > starts[at]:
            raise UserError(
                f"{where} goes on at position {at}, where several sequences stood, and not all of "
                "them go on",
                "record fewer passes (passes=range(...)), or one prompt.",
            )
        elif not here and before is not None and rows[before][-1] + 1 == at:
            rows[before] += row
            continue
        elif not here and cached and each.phase == PREFILL and at < max(ends, default=0):
            here, new = [new], new + 1
        if not here:
            raise _unknown(where, at, ends)
        rows[here[0]] = list(row)
    refuse_hidden(where, len(rows), sum(map(len, rows.values())), logits)
    left = [end for n, end in enumerate(ends) if n not in rows] if logits != len(rows) else []
    for at in left:
        if any(row[0] < at <= row[-1] for row in rows.values()):
            raise UserError(
                f"{where} may be of two sequences, of which one goes on at position {at}, where it "
                "stood before",
                _APART,
            )
    return list(rows.items())


def _unknown(where: str, at: int, ends: Sequence[int]) -> UserError:
    """Return the error of a piece at a position where no sequence stood."""
    told = "a piece is missing"
    if at < max(ends):
        told = "what stands there was computed twice, or cached"
    held = ", ".join(map(str, sorted({*ends})))
    return UserError(
        f"{where} goes on at position {at}, and those before it ended at {held}: {told}",
        f"{_CURE}.",
    )


def refuse_hidden(where: str, sequences: int, tokens: int, logits: int | None) -> None:
    """Raise UserError for logits of more sequences than positions tell apart.

    One ends where another one's positions go on.
    """
    if logits is not None and sequences < logits != tokens:
        raise UserError(
            f"{where} has logits of {logits} sequences, and its positions tell {sequences} apart",
            _APART,
        )


@dataclass(frozen=True)
class PassFiles(RequestFiles):
    """What each rank has at one site of passes, ``held`` by the file of its first rank."""

    held: Mapping[Path, SiteFiles]

    @property
    def name(self) -> str:
        """What the first pass has."""
        return next(iter(self.held.values())).name

    def of_pass(self, of: ModelPass) -> list[torch.Tensor]:
        """Return what each rank holds of a pass, of all its tokens, [token, ...]."""
        if of.folder not in self.held:
            raise ValueError(f"{of.folder.name}, which has a piece of the prompt, lacks it")
        rows, tokens, found = len(of.requests), len(of.positions), []
        for part in self.held[of.folder].read():
            # Sequences of a batch have an axis of their own, and as many tokens each.
            flat = (
                part.flatten(0, 1)
                if part.shape[:2] in ((rows, tokens // rows), (rows, 1))
                else part
            )
            own = flat.shape[0] if flat.dim() else 0
            if own != tokens and not (self.last and own == rows):
                raise ValueError(f"{of.folder.name} holds {own} tokens of it, of {tokens}")
            found.append(flat)
        return found


def joined(
    captures: Captures,
    passes: Sequence[DumpedPass],
    requests: Sequence[ServedRequest],
    notes: Sequence[str] = (),
) -> Captures:
    """Return captures with a row for each sequence, of which step N is pass N in ``captures``."""
    held: dict[Site, dict[Path, SiteFiles]] = {}
    for site, files in captures.parts.items():
        held.setdefault(Site(site.path, site.end), {})[Path(passes[site.step].file)] = files
    parts: dict[Site, SiteFiles] = {}
    for step, rows in enumerate(by_step(requests)):
        used = {chunk.of.folder for row in rows for chunk in row}
        for site, own in held.items():
            if seen := {path: files for path, files in own.items() if path in used}:
                paths = tuple(dict.fromkeys(path for each in seen.values() for path in each.paths))
                made = PassFiles(paths, tuple(rows), site.path == HEAD, seen)
                parts[site.at_step(step or None)] = made
    pieces = max(len(each.chunks) for each in requests)
    note = f"prompts are joined of pieces in up to {pieces} passes; {step} decode steps are of all"
    return replace(
        captures,
        parts=parts,
        on_the_right=True,
        rows=tuple(each.tokens for each in requests),
        notes=(*captures.notes, note, *notes),
    )
