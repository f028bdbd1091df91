"""ModelCapture: the files that a vLLM Neuron model leaves, pass by pass, request by request.

A file is ``dp{D}/{prefill_s{BUCKET}|decode_b{BATCH}}_{COUNTER}/{MODULE}/rank{R}.pt``; beside the
modules, ``{pass}_meta.json`` says of which requests a pass was (``req_ids``), and where its tokens
stand (``positions``). Tensors have tokens and no sequences: those of a prefill are one request's,
or one's behind the other's, and those of a decode step have a row for each request. Padding stands
behind them. In a prefill ranks share the tokens of what stands between a block's parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from layerparity.anatomy.site import HEAD, Site
from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.ground.files import reading
from layerparity.ground.parse import parse_json
from layerparity.record.captures.base import Captures, Given, SiteFiles, captured

if TYPE_CHECKING:
    import torch

    from layerparity.numbers.rank_parts import Split

_PASS = re.compile(r"(?P<phase>prefill_s|decode_b)(?P<size>\d+)_\d+", re.ASCII)
_REPLICA = re.compile(r"dp\d+", re.ASCII)
_RANK = re.compile(r"rank(\d+)\.pt", re.ASCII)
# The model that is served, among those that captured; in older releases it has no folder.
_TARGET = "target"
_WRAPPED = re.compile(r"(?:language_model\.)?(?:model\.)?(?P<module>.*)")


def matches(folder: Path) -> bool:
    """Say whether a folder holds a pass of a model."""
    models = [folder, *(each for each in folder.iterdir() if each.is_dir())]
    replicas = [each for where in models for each in _inside(where, _REPLICA)]
    return any(_inside(each, _PASS) for each in replicas)


def read(given: Given) -> Captures:
    """Return what the served model captured, a row for each request.

    Raises UserError where a pass, a file or a rank is missing, and where the requests are not those
    that the command says were fed.
    """
    passes = _passes(given.folder)
    requests = _requests(given.folder, passes)
    rows = _in_rows(given.folder, requests, given.fed())
    steps = min(len(each.steps) for each in rows)
    found: dict[Site, SiteFiles] = {}
    splits: dict[Site, Split] = {}
    ignored = []
    for module in _modules(given.folder, passes):
        match = _WRAPPED.fullmatch(module)
        assert match is not None, "any name is one"
        site, split = given.site(f"{match['module']}.out")
        if site is None:
            ignored.append(module)
            continue
        if split is not None:
            splits[site] = split
        for step in range(steps + 1):
            chunks = [(row.steps[step - 1],) if step else tuple(row.chunks) for row in rows]
            parts = RequestFiles.of(module, chunks, last=site.path == HEAD)
            found.setdefault(site.at_step(step or None), parts)
    also = tuple(each.folder / f"{each.folder.name}_meta.json" for each in passes)
    notes = _notes(given.folder, requests, rows, steps)
    return Captures(found, len(passes[0].ranks), tuple(ignored), splits, notes, also)


class _ModelPass(NamedTuple):
    """One call of the model: ``positions`` are those of its bucket's tokens, padding behind."""

    folder: Path
    prefill: bool
    requests: tuple[str, ...]
    positions: tuple[int, ...]
    ranks: range
    modules: frozenset[str]


class _Chunk(NamedTuple):
    """``tokens`` of one request in a pass: from ``first`` on, the first one at ``position``.

    It is the ``place``-th request of the pass.
    """

    of: _ModelPass
    place: int
    first: int
    tokens: int
    position: int


@dataclass(frozen=True)
class _Request:
    """One request: the chunks of its prompt, and its decode steps, in their order."""

    name: str
    chunks: tuple[_Chunk, ...]
    steps: tuple[_Chunk, ...]

    @property
    def tokens(self) -> int:
        """How many tokens its prompt has, or is padded to: nothing else may show its end."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def may_be_shorter(self) -> bool:
        """Whether its last bucket is full, maybe of padding that is counted on."""
        last = self.chunks[-1]
        return not self.steps and last.first + last.tokens == len(last.of.positions)

    def cut(self, tokens: int) -> _Request:
        """Return it with a prompt of so many tokens."""
        *before, last = self.chunks
        own = last.tokens - (self.tokens - tokens)
        return _Request(self.name, (*before, last._replace(tokens=own)), self.steps)


@dataclass(frozen=True)
class RequestFiles(SiteFiles):
    """What each rank captured of a module in one pass of each row, which has had several chunks.

    ``last`` says that it may have been given no tokens but the last one of a request.
    """

    module: str
    rows: tuple[tuple[_Chunk, ...], ...]
    last: bool

    @classmethod
    def of(cls, module: str, rows: Sequence[tuple[_Chunk, ...]], last: bool) -> RequestFiles:
        """Return what ranks captured of a module, and the files that it lies in."""
        used = {chunk.of.folder: chunk.of for row in rows for chunk in row}
        paths = [_file(each, module, rank) for each in used.values() for rank in each.ranks]
        return cls(tuple(paths), module, tuple(rows), last)

    def read(self) -> list[torch.Tensor]:
        """Return what each rank has, [row, token, ...], zeros behind the tokens of shorter rows.

        Raises UserError for a file of no tensor, and ValueError for one of other tokens.
        """
        import torch

        held = {chunk.of.folder: self._of_pass(chunk.of) for row in self.rows for chunk in row}
        ranks = self.rows[0][0].of.ranks
        rows = [[self._of_row(held, rank, row) for row in self.rows] for rank in ranks]
        return [torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in rows]

    def _of_pass(self, of: _ModelPass) -> list[torch.Tensor]:
        """Return what each rank holds of a pass, of all its tokens, [token, ...]."""
        import torch

        parts = [captured(_file(of, self.module, rank)) for rank in of.ranks]
        tokens, own = len(of.positions), parts[0].shape[0] if parts[0].dim() else 0
        alike = all(part.dim() and part.shape[0] == own for part in parts)
        if alike and of.prefill and own * len(parts) == tokens:
            # Each rank has its share of the tokens.
            return [torch.cat(parts)] * len(parts)
        if alike and (own == tokens or (self.last and own >= len(of.requests))):
            return parts
        what = f"{own} tokens" if alike else "other numbers of tokens on each rank"
        raise ValueError(f"{of.folder.name} holds {what} of it, in a pass of {tokens}")

    def _of_row(
        self, held: dict[Path, list[torch.Tensor]], rank: int, row: Sequence[_Chunk]
    ) -> torch.Tensor:
        import torch

        parts = [held[chunk.of.folder][rank] for chunk in row]
        if self.last and parts[-1].shape[0] != len(row[-1].of.positions):
            # A chunk's own last token is the prompt's in the last chunk alone.
            return parts[-1][row[-1].place : row[-1].place + 1]
        own = zip(parts, row, strict=True)
        return torch.cat([part[each.first : each.first + each.tokens] for part, each in own])


def _file(of: _ModelPass, module: str, rank: int) -> Path:
    return of.folder / module / f"rank{rank}.pt"


def _inside(folder: Path, name: re.Pattern[str]) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in found if each.is_dir() and name.fullmatch(each.name))


def _passes(folder: Path) -> list[_ModelPass]:
    """Return the passes of the served model. Raises UserError where one lacks a file."""
    model = next((e for e in (folder / _TARGET, folder) if _inside(e, _REPLICA)), None)
    if model is None:
        raise UserError(
            f"{folder} holds captures of {', '.join(_others(folder))} alone",
            "capture the model that is served, or name the folder of one model.",
        )
    found = []
    for where in (each for replica in _inside(model, _REPLICA) for each in _inside(replica, _PASS)):
        path = where / f"{where.name}_meta.json"
        cure = "copy the whole folder of each pass, its _meta.json too."
        if not path.is_file():
            raise UserError(f"{path} is missing: it says which tokens the pass was given", cure)
        names, places = _told(path, cure)
        held = {each.name: _ranks_of(each) for each in where.iterdir() if each.is_dir()}
        ranks = range(max((max(each, default=0) for each in held.values()), default=0) + 1)
        for module, own in held.items():
            for lost in sorted(set(ranks) - own):
                raise UserError(
                    f"{where} holds {module} of other ranks and not of rank {lost}",
                    "copy every rank's files of each pass.",
                )
        prefill = where.name.startswith("prefill")
        found.append(_ModelPass(where, prefill, names, places, ranks, frozenset(held)))
    return found


def _told(path: Path, cure: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a pass's requests and positions. Raises UserError where its file does not say them."""
    with reading(path, cure):
        # It may say more, which is not ours to know.
        told = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise ValueError("is no object")
        names: list[str] = decode(list[str], told.get("req_ids"))
        places: list[int] = decode(list[int], told.get("positions"))
    return tuple(names), tuple(places)


def _ranks_of(module: Path) -> set[int]:
    matches = (_RANK.fullmatch(each.name) for each in module.iterdir())
    return {int(match[1]) for match in matches if match}


def _modules(folder: Path, passes: Sequence[_ModelPass]) -> list[str]:
    """Return what was captured in every pass, of as many ranks. UserError where a pass differs."""
    first = passes[0]
    for each in passes:
        names = sorted(each.modules ^ first.modules) or ["files of as many ranks"]
        if (each.modules, each.ranks) != (first.modules, first.ranks):
            raise UserError(
                f"{folder}: {first.folder.name} and {each.folder.name} do not both hold {names[0]}",
                "copy every rank's files of each pass.",
            )
    return sorted(first.modules)


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


def _requests(folder: Path, passes: Sequence[_ModelPass]) -> list[_Request]:
    """Return the requests, in the order of their names. Raises UserError where tokens are missing.

    Of a prefill each request has a run of positions; of a step each has one.
    """
    prompts: dict[str, list[_Chunk]] = {}
    steps: dict[str, list[_Chunk]] = {}
    for each in passes:
        runs = _runs(each.positions)
        if not each.prefill:
            runs = [(place, 1, position) for place, position in enumerate(each.positions)]
        for place, (name, run) in enumerate(zip(each.requests, runs, strict=False)):
            into = prompts if each.prefill else steps
            into.setdefault(name, []).append(_Chunk(each, place, *run))
    if not prompts:
        raise UserError(f"{folder} holds no prefill", "capture from the first pass on.")
    return [
        _request(folder, name, prompts[name], steps.get(name, []))
        for name in sorted(prompts, key=_natural)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts names by the numbers in them."""
    return [(int(each), "") if each.isdigit() else (-1, each) for each in re.split(r"(\d+)", name)]


def _request(
    folder: Path, name: str, prompt: Sequence[_Chunk], steps: Sequence[_Chunk]
) -> _Request:
    """Return one request, its chunks in order, each from where the one before it ends."""
    prompt, steps = (sorted(each, key=lambda chunk: chunk.position) for each in (prompt, steps))
    if prompt[0].position:
        raise UserError(
            f"{folder}: request {name} begins at position {prompt[0].position}: what stands before "
            "was computed for another one",
            "capture without prefix caching (enable_prefix_caching=False), from the first pass on.",
        )
    made = _Request(name, tuple(prompt), tuple(steps))
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


def _in_rows(folder: Path, requests: Sequence[_Request], fed: Sequence[int]) -> list[_Request]:
    """Return a request for each row that was fed, of its number of tokens. Raises UserError."""
    free, rows = list(requests), []
    for number, tokens in enumerate(fed, 1):
        own = next((each for each in free if each.tokens == tokens), None)
        if own is None:
            own = next((e for e in free if e.may_be_shorter and e.tokens > tokens), None)
        if own is None:
            held = ", ".join(f"{each.name} has {each.tokens}" for each in requests)
            raise UserError(
                f"Row {number} of what was fed has {tokens} tokens, and no request of {folder} "
                f"that is left: {held}",
                "give inputs=tokens inputs.file= a row for each request, with the tokens that the "
                "engine puts before a prompt.",
            )
        free.remove(own)
        rows.append(own if own.tokens == tokens else own.cut(tokens))
    return rows


def _notes(
    folder: Path, requests: Sequence[_Request], rows: Sequence[_Request], steps: int
) -> tuple[str, ...]:
    """Return what is to be known: which request is which row, and what was left out."""
    notes = []
    if len(rows) > 1:
        notes.append(f"rows are requests {', '.join(each.name for each in rows)}, in this order")
    names = {each.name for each in rows}
    left = [each.name for each in requests if each.name not in names]
    if left:
        notes.append(f"requests {', '.join(left)} are no rows of what was fed, and are left out")
    longest = max(len(each.steps) for each in rows)
    if longest > steps:
        notes.append(f"{steps} decode steps are kept, which every request has, of {longest}")
    if others := _others(folder):
        notes.append(f"captures of other models are left out: {', '.join(others)}")
    return tuple(notes)


def _others(folder: Path) -> list[str]:
    """Return the models beside the one that is served: drafts, towers."""
    found = [each for each in folder.iterdir() if each.is_dir() and _inside(each, _REPLICA)]
    return sorted(each.name for each in found if each.name != _TARGET)
