"""What ``layerparity.recording`` wrote: files of passes, and a description of each rank's."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_shapes
from layerparity.numbers.rank_parts import Split
from layerparity.record.dump_files import Dumped
from layerparity.record.dump_format import (
    DUMP_FILE,
    IDS,
    LOGITS,
    PASS_FILE,
    DumpDescription,
    description_of,
)
from layerparity.record.engines._descriptions import AGAIN, descriptions, version_of
from layerparity.record.engines._pieces import goes_on, joined, refuse_hidden, sequences_of
from layerparity.record.engines.base import Captures, Given, by_name, usual
from layerparity.record.name_map import split_of
from layerparity.record.tensor_source import SiteSources

TITLE = "what layerparity.recording wrote"
# What a model makes logits of, which it may scale or cap; and what it makes of them.
_HEAD = "lm_head.out"
_HEADS = (f"{LOGITS}.out", "logits_processor.out", _HEAD)
_TABLE = {
    IDS: "embed_tokens:in",
    **dict.fromkeys(_HEADS, "lm_head:out"),
    # A table of tokens is recorded where it is the whole embedding.
    "wte.out": "embed_tokens:out",
    **{
        f"layers.{{n}}.mlp.{gate}.{end}": f"layers.{{n}}.mlp.gate:{end}"
        for gate in ("gate", "router")
        for end in ("choices", "weights")
    },
}
_SHOWN = 3


def matches(folder: Path) -> bool:
    """Say whether a folder holds a description of ours, or passes of a recording."""
    names = [each.name for each in folder.iterdir()]
    ours = any(DUMP_FILE.fullmatch(each) and version_of(folder / each) for each in names)
    return ours or any(PASS_FILE.fullmatch(each) for each in names)


def read(given: Given) -> Captures:
    """Return what was recorded.

    Raises UserError where a recording did not end, a rank or a file is missing, ranks are of two
    runs, or the passes are not of one prompt, or one batch, in pieces or whole.
    """
    dumps = descriptions(given.folder)
    passes = dumps[0].passes
    whole, tensors = goes_on(given.folder, passes), []
    # How many rows the logits of sequences have that stand one behind the other, by file.
    heads: dict[str, int] = {}
    for rank, dump in enumerate(dumps):
        for number, each in enumerate(dump.passes):
            path = given.folder / each.file
            if PASS_FILE.fullmatch(each.file) is None or not path.is_file():
                raise UserError(f"{given.folder} lacks {each.file}", "copy every file of it.")
            keys = tensor_shapes(path, AGAIN)
            tensors += [
                Dumped(path, key, (usual(key), key), rank, each.step if whole else number)
                for key in keys
                if usual(key) != _HEAD or f"{LOGITS}.out" not in keys
            ]
            for key in (key for key in keys if usual(key) in _HEADS):
                heads[each.file] = prod(keys[key][:-1])
    rows, notes = passes[0].rows if whole else None, _notes(dumps[0])
    of = dumps[0].ranks if len(dumps) < dumps[0].ranks else 0
    captures = by_name(given, tensors, _TABLE, notes=notes, rows=rows, what="recording", of=of)
    also = tuple(given.folder / description_of(rank) for rank in range(len(dumps)))
    said = _splits(captures, dumps[0], also[0])
    if not whole:
        requests, told = sequences_of(given.folder, passes, heads, captures.ranks)
        captures = joined(captures, passes, requests, told)
    elif rows is not None:
        where = f"{given.folder}: {passes[0].file}"
        refuse_hidden(where, len(rows), sum(rows), heads.get(passes[0].file))
    splits, operands = {**said, **captures.splits}, tuple(dumps[0].operands)
    return replace(captures, splits=splits, also=also, operands=operands)


def _splits(captures: Captures, dump: DumpDescription, path: Path) -> dict[Site, Split]:
    """Return how sites lie on the ranks, as the recorder was told."""
    found = {}
    for site, held in captures.parts.items():
        assert isinstance(held, SiteSources), "tensors by name are such"
        key = held.sources[0].operands[0].dumped.key
        split = split_of(dump.splits.get(key or "", "").split(), path)
        if split is not None:
            found[Site(site.path, site.end)] = split
    return found


def _notes(dump: DumpDescription) -> list[str]:
    """Return what is to be known: what recorded it, and what it never saw."""
    told = f"{dump.engine} {dump.engine_version}".strip()
    notes = [f"recorded of {told} with torch {dump.torch}, mostly in {dump.dtype}", *dump.notes]
    whys: dict[str, list[str]] = {}
    for key, why in dump.unseen.items():
        whys.setdefault(why, []).append(key)
    for why, keys in whys.items():
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        notes.append(f"never seen: {', '.join(keys[:_SHOWN])}{more} ({why})")
    return notes
