"""The dumper of SGLang, which Megatron users have too: a file a tensor, that says what it is.

``dump_{time}/step=0___rank=0___dump_index=7___name=...___layer_id=3.pt`` holds value and meta. Of
modules that it hooks, names are ``non_intrusive__{module}.{inputs|output}[.{which}]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import PartKind, Split
from layerparity.record.engines._dumper_files import (
    FILE,
    MEGATRON,
    DumpedAxes,
    DumperFile,
    TurnedFiles,
    dumper_files,
)
from layerparity.record.engines._served import (
    SERVED,
    ModuleOutput,
    ServedPrompts,
    served_captures,
    served_prompts,
)
from layerparity.record.engines.base import Captures, Given
from layerparity.record.name_map import Names
from layerparity.record.tensor_source import SiteSources

TITLE = "what SGLang's dumper wrote"
_SGLANG: Names = {**SERVED, "logits_processor.out/next_token_logits": "lm_head:out"}


def matches(folder: Path) -> bool:
    """Say whether a folder, or one in it, holds a file of the dumper."""
    return bool(_runs(folder))


def read(given: Given) -> Captures:
    """Return what a dump holds of one batch of prompts.

    Raises UserError where a rank or a step is missing, for two runs, and where ranks share tokens.
    """
    runs = _runs(given.folder)
    if len(runs) != 1:
        told = " and ".join(each.name for each in runs[:2])
        raise UserError(f"{given.folder} holds two runs, {told}", "give the folder of one.")
    files = dumper_files(runs[0])
    # Each data-parallel rank has tokens of its own.
    own = [f for f in files if not f.ranks.get("dp_rank", f.ranks.get("attn_dp_rank", 0))]
    megatron = any(each.megatron for each in own)
    prompts = _prompts(given, own, megatron=megatron)
    outputs = [
        ModuleOutput(f.path, "value", f.name, f.shape, step, f.rank, f.stage, f.hooked)
        for f in own
        if (step := prompts.steps.get(f.step)) is not None
    ]
    left = len(files) - len(own)
    notes = [f"{left} files of other data-parallel ranks are left out"] if left else []
    captures = served_captures(given, outputs, prompts, notes, MEGATRON if megatron else _SGLANG)
    return _laid_out(captures, {each.path: each for each in own}, _length(own))


def _runs(folder: Path) -> list[Path]:
    """Return the folder, and those in it, that hold files of the dumper."""
    inside = [folder, *(each for each in sorted(folder.iterdir()) if each.is_dir())]
    return [each for each in inside if any(FILE.fullmatch(path.name) for path in each.iterdir())]


def _prompts(given: Given, files: Sequence[DumperFile], *, megatron: bool) -> ServedPrompts:
    """Return which steps are of one batch of prompts, and how many tokens these have."""
    steps = sorted({each.step for each in files})
    if megatron:
        if any(len(each.values) > 2 for each in files if each.name == "cu_seqlens_q"):
            raise UserError(f"{given.folder} holds packed sequences", "dump one in a batch.")
        left = (f"{len(steps) - 1} later steps are left out",) if steps[1:] else ()
        return ServedPrompts((), {steps[0]: 0}, left)
    positions = {each.step: each.values for each in reversed(files) if each.name == "positions"}
    if positions:
        return served_prompts(given, positions)
    return ServedPrompts(tuple(given.fed()), {step: n for n, step in enumerate(steps)}, ())


def _length(files: Sequence[DumperFile]) -> int:
    """Return how many tokens Megatron's rows have, 0 where nothing says it."""
    ids = [each.shape for each in files if each.megatron and each.name == "input_ids"]
    return ids[0][-1] if ids else 0


def _laid_out(captures: Captures, of: Mapping[Path, DumperFile], length: int) -> Captures:
    """Return captures with axes in order, and split as their files say. Raises UserError."""
    parts, splits = dict(captures.parts), dict(captures.splits)
    for site, held in captures.parts.items():
        assert isinstance(held, SiteSources), "by_name makes them"
        file = of[held.sources[0].operands[0].dumped.path]
        axes = _axes(file, length)
        if file.megatron and axes.order:
            parts[site] = TurnedFiles(held.paths, held, axes.order)
        if axes.split is not None and captures.ranks > 1:
            splits.setdefault(Site(site.path, site.end), axes.split)
    return replace(captures, parts=parts, splits=splits)


def _axes(file: DumperFile, length: int) -> DumpedAxes:
    """Return how a tensor lies; Megatron's have tokens first, of which each rank may have some."""
    if file.axes:
        axes = DumpedAxes.of(file.axes, file.path.name)
        if axes.split is not None and axes.split.axis == 0 and not file.megatron:
            raise UserError(f"{file.path.name}: ranks share tokens", "dump without that.")
        return axes
    if not file.megatron or len(file.shape) < 3:
        return DumpedAxes()
    order = (1, 0, *range(2, len(file.shape)))
    some = length and file.shape[0] < length and file.ranks.get("sp_size", 1) > 1
    return DumpedAxes(order, Split(PartKind.SHARDED, 1) if some else None)
