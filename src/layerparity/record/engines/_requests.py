"""Whose tokens each pass of a served model was of: requests, told apart by names and positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from layerparity.ground.errors import UserError
from layerparity.record.tensor_source import SiteFiles

if TYPE_CHECKING:
    import torch


class ModelPass(NamedTuple):
    """One call of the model: ``positions`` are those of its bucket's tokens, padding behind."""

    folder: Path
    prefill: bool
    requests: tuple[str, ...]
    positions: tuple[int, ...]
    ranks: range
    modules: frozenset[str]


class ServedChunk(NamedTuple):
    """``tokens`` of one request in a pass: from ``first`` on, the first one at ``position``.

    It is the ``place``-th request of the pass.
    """

    of: ModelPass
    place: int
    first: int
    tokens: int
    position: int


@dataclass(frozen=True)
class ServedRequest:
    """One request: the chunks of its prompt, and its decode steps, in their order."""

    name: str
    chunks: tuple[ServedChunk, ...]
    steps: tuple[ServedChunk, ...]

    @property
    def tokens(self) -> int:
        """How many tokens its prompt has, or is padded to: nothing else may show its end."""
        return sum(chunk.tokens for chunk in self.chunks)

    def may_have(self, tokens: int) -> bool:
        """Say whether its prompt may end there: in its last bucket, full of padding counted on."""
        last = self.chunks[-1]
        full = last.first + last.tokens == len(last.of.positions)
        return not self.steps and full and self.tokens - last.tokens < tokens < self.tokens

    def cut(self, tokens: int) -> ServedRequest:
        """Return it with a prompt of so many tokens."""
        *before, last = self.chunks
        own = last.tokens - (self.tokens - tokens)
        return ServedRequest(self.name, (*before, last._replace(tokens=own)), self.steps)


def by_step(rows: Sequence[ServedRequest]) -> list[list[tuple[ServedChunk, ...]]]:
    """Return the chunks of each row in the prefill, and in each decode step that every row has."""
    found = [[each.chunks for each in rows]]
    for step in zip(*(each.steps for each in rows), strict=False):
        found.append([(chunk,) for chunk in step])
    return found


@dataclass(frozen=True)
class RequestFiles(SiteFiles):
    """What each rank has of a module in one pass of each row, which has had several chunks.

    ``last`` says that it may have been given no tokens but the last one of a request.
    """

    rows: tuple[tuple[ServedChunk, ...], ...]
    last: bool

    def of_pass(self, of: ModelPass) -> list[torch.Tensor]:
        """Return what each rank holds of a pass, of all its tokens, [token, ...]."""
        raise NotImplementedError

    def read(self) -> list[torch.Tensor]:
        """Return what each rank has, [row, token, ...], zeros behind the tokens of shorter rows.

        Raises UserError for a file of no tensor, and ValueError for one of other tokens.
        """
        import torch

        held = {chunk.of.folder: self.of_pass(chunk.of) for row in self.rows for chunk in row}
        kinds = {(part.dtype, part.shape[1:]) for parts in held.values() for part in parts}
        if len(kinds) > 1:
            told = sorted(f"{dtype} {[*shape]}".removeprefix("torch.") for dtype, shape in kinds)
            raise ValueError(f"its passes hold {' and '.join(told)} for a token")
        ranks = self.rows[0][0].of.ranks
        rows = [[self._of_row(held, rank, row) for row in self.rows] for rank in ranks]
        return [torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in rows]

    def _of_row(
        self, held: dict[Path, list[torch.Tensor]], rank: int, row: Sequence[ServedChunk]
    ) -> torch.Tensor:
        import torch

        parts = [held[chunk.of.folder][rank] for chunk in row]
        if self.last and parts[-1].shape[0] != len(row[-1].of.positions):
            # A chunk's own last token is the prompt's in the last chunk alone.
            return parts[-1][row[-1].place : row[-1].place + 1]
        own = zip(parts, row, strict=True)
        return torch.cat([part[each.first : each.first + each.tokens] for part, each in own])


def _runs(positions: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return where positions go on one by one: first place, count, first position."""
    runs: list[tuple[int, int, int]] = []
    for place, position in enumerate(positions):
        if runs and position == runs[-1][2] + runs[-1][1]:
            first, count, start = runs[-1]
            runs[-1] = (first, count + 1, start)
        else:
            runs.append((place, 1, position))
    return runs


def requests_of(
    folder: Path, passes: Sequence[ModelPass]
) -> tuple[list[ServedRequest], dict[str, UserError]]:
    """Return the requests, in the order of their names, and why others are none.

    Of a prefill each request has a run of positions; of a step each has one. Raises UserError where
    a pass does not say which tokens are whose.
    """
    prompts: dict[str, list[ServedChunk]] = {}
    steps: dict[str, list[ServedChunk]] = {}
    for each in passes:
        count, places = len(each.requests), each.positions
        runs = _runs(places)
        if not each.prefill:
            runs = [(place, 1, position) for place, position in enumerate(places)]
            if {*places[count:]} - {0, *places[:count]} - {p for p in places if p < 0}:
                raise UserError(
                    f"{each.folder.name} has {len(places)} tokens of {count} requests, and none "
                    "of them pads",
                    "capture without speculation.",
                )
        if len(runs) < count:
            raise UserError(
                f"{each.folder.name} is of {count} requests, and its positions are of {len(runs)}",
                "capture with a request in each prefill (no prompts in one pass).",
            )
        for place, (name, run) in enumerate(zip(each.requests, runs, strict=False)):
            into = prompts if each.prefill else steps
            into.setdefault(name, []).append(ServedChunk(each, place, *run))
    if not prompts:
        raise UserError(f"{folder} holds no prefill", "capture from the first pass on.")
    found, wrong = [], {}
    for name in sorted({**prompts, **steps}, key=natural):
        try:
            found.append(_request(folder, name, prompts.get(name, []), steps.get(name, [])))
        except UserError as error:
            wrong[name] = error
    return found, wrong


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts names by the numbers in them, however long these are."""
    texts = re.split(r"([0-9]+)", name)
    # Every second part is a number: of two the longer one is larger.
    numbers = [part.lstrip("0") for part in texts[1::2]]
    keys = [(-1, text) for text in texts]
    keys[1::2] = [(len(number), number) for number in numbers]
    return keys


def _request(
    folder: Path, name: str, prompt: Sequence[ServedChunk], steps: Sequence[ServedChunk]
) -> ServedRequest:
    """Return one request, its chunks in order, each from where the one before it ends."""
    prompt, steps = (sorted(each, key=lambda chunk: chunk.position) for each in (prompt, steps))
    if not prompt:
        raise UserError(
            f"{folder}: request {name} has no prefill", "capture from the first pass on."
        )
    if prompt[0].position:
        raise UserError(
            f"{folder}: request {name} begins at position {prompt[0].position}: what stands before "
            "was computed for another one",
            "capture without prefix caching (enable_prefix_caching=False), from the first pass on.",
        )
    made = ServedRequest(name, tuple(prompt), tuple(steps))
    if steps and 0 < made.tokens - steps[0].position < prompt[-1].tokens:
        # Padding was counted on: the first step shows where the prompt ends.
        made = made.cut(steps[0].position)
    end = 0
    for chunk in (*made.chunks, *made.steps):
        if chunk.position != end:
            said = "no token at" if chunk.position > end else "twice the token at"
            raise UserError(
                f"{folder}: request {name} has {said} position {min(end, chunk.position)}",
                "keep the files of one run, each of its passes; capture without speculation.",
            )
        end += chunk.tokens
    return made


def in_rows(
    folder: Path,
    requests: Sequence[ServedRequest],
    wrong: Mapping[str, UserError],
    fed: Sequence[int],
) -> list[ServedRequest]:
    """Return a request for each row that was fed, of its number of tokens. Raises UserError."""
    free, rows = list(requests), []
    for number, tokens in enumerate(fed, 1):
        own = next((each for each in free if each.tokens == tokens), None)
        shorter = [each for each in requests if each.may_have(tokens)]
        if own is None and len(fed) == len(shorter) == 1:
            own = shorter[0]
        if own is None and wrong:
            raise next(iter(wrong.values()))
        if own is None:
            held = ", ".join(f"{each.name} has {each.tokens}" for each in requests)
            raise UserError(
                f"Row {number} of what was fed has {tokens} tokens, and no request of {folder} "
                f"that is left: {held}",
                "give inputs=tokens inputs.file= a row for each request, with the tokens that the "
                "engine puts before a prompt; where padding is counted on, capture a decode step.",
            )
        free.remove(own)
        rows.append(own if own.tokens == tokens else own.cut(tokens))
    return rows
