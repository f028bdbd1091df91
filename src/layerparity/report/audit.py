"""Make tables and sentences of an audit: for the terminal and, as Markdown, for the run's page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from layerparity.checkpoint.audit import Audit
from layerparity.checkpoint.deep import DeepAudit
from layerparity.checkpoint.finding import counted, grouped
from layerparity.checkpoint.sizes import ByteCounts
from layerparity.ground.console import bytes_text
from layerparity.ground.numeral import percent

SHOWN = 30
_LARGEST = 5
_TYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Table:
    """A table with its title."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def tables(audit: Audit) -> Iterator[Table]:
    """Yield the tables of an audit, the findings last."""
    whole = max(audit.sizes.whole.stored, 1)
    dtypes: list[tuple[Any, ...]] = [
        (name, each.tensors, bytes_text(each.stored), percent(each.stored / whole))
        for name, each in audit.sizes.dtypes.items()
    ]
    yield Table("As stored", ("dtype", "tensors", "bytes", "share"), dtypes)
    yield _parts(audit)
    largest: list[tuple[Any, ...]] = [
        (each.name, each.dtype, " x ".join(map(str, each.shape)), bytes_text(each.bytes))
        for each in audit.sizes.largest[:_LARGEST]
    ]
    yield Table("Largest tensors", ("name", "dtype", "shape", "bytes"), largest)
    if audit.peaks:
        yield _peaks(audit)
    if audit.findings:
        yield _findings(audit)


def summary(audit: Audit) -> str:
    """Return in one line what the folder holds."""
    sizes = audit.sizes
    complete = audit.parameters in (0, sizes.parameters)
    due = "" if complete else f" of {audit.parameters:,}"
    buffers = f" and {sizes.buffers:,} numbers in buffers" if sizes.buffers else ""
    if sizes.copies:
        buffers += f" and {sizes.copies:,} numbers of a tied weight stored twice"
    return (
        f"{sizes.parameters:,}{due} parameters{buffers} in {sizes.whole.tensors} tensors, "
        f"{counted(audit.files, 'file')}; headers read in {audit.seconds:.1f} s"
    )


def sentences(audit: Audit) -> Iterator[str]:
    """Yield what the tables add up to, the verdict last."""
    packing = audit.packing
    if packing.kinds or packing.unpacked.faults:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in packing.kinds.items())
        yield (
            f"Packed weights: {kinds or 'none'} with all that they need; {packing.faulty} cannot "
            f"be read, {packing.orphans} scales belong to no weight"
        )
    if audit.peaks:
        yield _naive(audit)
    if audit.deep:
        yield _reading(audit, audit.deep)
    yield headline(audit)


def headline(audit: Audit) -> str:
    """Return the verdict in one line."""
    count, notes = len(audit.problems), len(audit.findings) - len(audit.problems)
    beside = f", {counted(notes, 'note')}" if notes else ""
    if count:
        first = audit.problems[0].text
        return f"PROBLEMS: {counted(count, 'problem')}{beside}; the first: {first}"
    tensors, depth = audit.sizes.whole.tensors, "headers only: audit.deep=true reads on"
    if audit.deep:
        unread = tensors - audit.deep.tensors
        but = f" but those of {counted(unread, 'tensor')}" if unread else ""
        depth = f"every number{but} was read"
    return f"OK: no problem in {tensors} tensors{beside} ({depth})"


def _reading(audit: Audit, deep: DeepAudit) -> str:
    """Say how many tensors were read number by number, and how long that took."""
    took = f"{bytes_text(deep.bytes)} in {deep.seconds:.1f} s"
    left = audit.sizes.whole.tensors - deep.tensors
    if not left:
        return f"every number of {deep.tensors} tensors was read: {took}"
    were = "was" if left == 1 else "were"
    return (
        f"{deep.tensors} of {audit.sizes.whole.tensors} tensors were read: {took}; {left} {were} "
        "not: damaged, or of a type that cannot be examined, as the findings say"
    )


def markdown(audit: Audit) -> str:
    """Return the audit for the run's page."""
    lines = [f"**{headline(audit)}**", "", f"`{audit.folder}`: {summary(audit)}", ""]
    for table in tables(audit):
        lines += [
            f"#### {table.title}",
            "",
            _line(table.columns),
            "|---" * len(table.columns) + "|",
        ]
        lines += [_line(row) for row in table.rows] + [""]
    return "\n".join([*lines, *(f"- {each}" for each in list(sentences(audit))[:-1])])


def _line(cells: tuple[Any, ...]) -> str:
    # A stored name may hold anything: a line stays one line, and a cell one cell.
    texts = (" ".join(str(cell).replace("|", "\\|").split()) for cell in cells)
    return "| " + " | ".join(texts) + " |"


def _parts(audit: Audit) -> Table:
    rows = [(name, *_bytes(each)) for name, each in _alike(audit.sizes.layers)]
    rows.append(("outside the layers", *_bytes(audit.sizes.outside)))
    rows.append(("whole", *_bytes(audit.sizes.whole)))
    columns = ("part", "tensors", "numbers", "stored", "in bf16", "in fp32")
    return Table("Bytes by layer", columns, _cut(rows))


def _bytes(each: ByteCounts) -> tuple[Any, ...]:
    widths = (each.stored, each.bf16, each.fp32)
    return (each.tensors, f"{each.numbers:,}", *(bytes_text(count) for count in widths))


def _alike(layers: dict[int, ByteCounts]) -> Iterator[tuple[str, ByteCounts]]:
    """Yield neighbouring layers of the same figures as one row."""
    run: list[int] = []
    for layer, each in layers.items():
        if run and (layers[run[-1]] != each or layer != run[-1] + 1):
            yield _range(run), layers[run[-1]]
            run = []
        run.append(layer)
    if run:
        yield _range(run), layers[run[-1]]


def _range(run: list[int]) -> str:
    return f"layer {run[0]}" if len(run) == 1 else f"each of layers {run[0]}..{run[-1]}"


def _peaks(audit: Audit) -> Table:
    rows = [
        (
            _TYPES[name],
            bytes_text(peak.sources),
            bytes_text(peak.stacked),
            bytes_text(peak.bytes),
            peak.weight or "-",
            bytes_text(peak.buffer) if peak.buffer else "-",
            bytes_text(peak.streaming),
        )
        for name, peak in audit.peaks.items()
    ]
    columns = (
        "buffers in",
        "state dict",
        "stacked copies",
        "peak",
        "reached at",
        "largest buffer",
        "streamed: two stages",
    )
    return Table("Memory of a naive conversion: all is read, then stacked", columns, rows)


def _naive(audit: Audit) -> str:
    narrow, wide = audit.peaks["bf16"], audit.peaks["fp32"]
    streamed = (
        f"device_map=stream holds two stages: {bytes_text(narrow.streaming)} in bfloat16, "
        f"{bytes_text(wide.streaming)} in float32"
    )
    if not wide.stacked:
        return f"nothing is stacked: the state dict is {bytes_text(narrow.sources)}; {streamed}"
    return (
        f"stacking buffers made in float32 would take {bytes_text(wide.stacked)} beside a state "
        f"dict of {bytes_text(wide.sources)}, {bytes_text(wide.bytes)} in all; {streamed}"
    )


def _findings(audit: Audit) -> Table:
    rows = [
        (
            ("note: " if group.first.note else "") + group.first.what,
            group.tensors or "-",
            group.first.text + (" (the first of several)" if group.findings > 1 else ""),
            group.first.cure,
        )
        for group in grouped(audit.findings)
    ]
    title = f"{counted(len(audit.findings), 'finding')}, alike ones together"
    return Table(title, ("what", "tensors", "where and how", "cure"), _cut(rows))


def _cut(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Leave out the middle of a long table: the JSON has every row."""
    if len(rows) <= SHOWN:
        return rows
    left = ("...", *("" for _ in rows[0][1:]))
    return [*rows[: SHOWN - 6], left, *rows[-5:]]
