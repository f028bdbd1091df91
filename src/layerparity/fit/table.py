"""Table: a plan as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity import console
from layerparity.backends._gpu.memory import size_text
from layerparity.fit.compiler import LIMIT
from layerparity.fit.divisibility import Divided
from layerparity.fit.placing import Answer, Share
from layerparity.fit.question import STREAM, Question
from layerparity.fit.ranges import ranges
from layerparity.fit.record import Plan
from layerparity.fit.survey import Surveyed

_SHOWN_DIVISORS = 64


def show_placement(question: Question, found: Answer) -> None:
    """Print where each module goes and what each device is left with."""
    columns = ("device", "modules", "parameters", "buffers", "KV cache", "activations")
    rows = [_row(share) for share in found.shares]
    if len(rows) > 1:
        size, cache = found.size, sum(share.cache for share in found.shares)
        sums = (f"{size.parameters:,}", f"{size.buffers:,}", console.bytes_text(cache))
        rows.append(("all", "", *sums, "", "", ""))
    if rows:
        console.table("Placement, bytes", (*columns, "of", "headroom"), rows)
    size = question.model.size(question.dtype)
    console.say(
        f"{question.model.parameters:,} parameters are {size.parameters:,} bytes "
        f"({console.bytes_text(size.parameters)}) in {question.dtype}"
    )
    if question.strategy == STREAM:
        console.say("two stages in a row are in memory at once; the largest two are shown")


def show_survey(rows: Sequence[Surveyed], dtype: str) -> None:
    """Print which common machines hold the model."""
    columns = ("machine", "devices", "needed", "headroom", "tightest device", "fits", "note")
    table = [
        (
            row.machine.name,
            f"{row.machine.count} x {console.bytes_text(row.machine.each)}",
            console.bytes_text(row.needed),
            _signed(row.headroom),
            "" if row.tightest is None else _signed(row.tightest),
            f"yes, device_map={row.way}" if row.fits else "no",
            row.note,
        )
        for row in rows
    ]
    console.table(f"Common machines, {dtype}, whole blocks", columns, table)


def show_neuron(plan: Plan) -> None:
    """Print what the Neuron compiler would refuse, and what splits evenly."""
    limit, large, degree = console.bytes_text(LIMIT), plan.too_large, plan.degree
    if large:
        rows = [
            (row.name, str(list(row.shape)), console.bytes_text(row.bytes), row.degree or "none")
            for row in large
        ]
        columns = ("weight", "shape", "bytes", "smallest tp_degree")
        console.table(f"Above the Neuron compiler's {limit} for one tensor", columns, rows)
    else:
        console.say(f"No tensor is above the Neuron compiler's {limit}.")
    columns = ("size", "is", f"tp_degree={degree} divides it", "divisors")
    sizes = [
        (row.what, row.size, "yes" if row.size % degree == 0 else "no", _divisors(row))
        for row in plan.sizes
    ]
    console.table("Tensor parallelism", columns, sizes)
    console.say(f"all but experts are divided by tp_degree={_listed(plan.degrees)}")


def _row(share: Share) -> tuple[str, ...]:
    modules = ranges(share.stages) or "computes what waits below"
    capacity = "" if share.device == "disk" else console.bytes_text(share.capacity)
    return (
        share.device,
        modules,
        f"{share.size.parameters:,}",
        f"{share.size.buffers:,}",
        console.bytes_text(share.cache),
        console.bytes_text(share.activations),
        capacity,
        "waits" if share.waits else _signed(share.headroom),
    )


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else ''}{console.bytes_text(abs(size))}"


def _divisors(row: Divided) -> str:
    shown = [each for each in row.divisors if each <= _SHOWN_DIVISORS]
    return _listed(shown) + (", ..." if len(shown) < len(row.divisors) else "")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(each) for each in numbers)


def why_not(found: Answer) -> str:
    """Return in one sentence why an answer does not fit; empty where it does."""
    if found.refused:
        return found.refused
    for share in found.shares:
        if share.waits:
            return (
                f"{size_text(share.weights)} of weights ({ranges(share.stages)}) find no place "
                "where they compute, and are copied there whenever they run."
            )
        if share.weights > share.limit:
            return (
                f"{share.device} may hold {size_text(share.limit)} of weights and is given "
                f"{size_text(share.weights)}."
            )
        if share.headroom < 0:
            return f"{share.device} lacks {size_text(-share.headroom)}."
    return ""
