"""Print a plan as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerparity.anatomy.site import Site
from layerparity.ground import console
from layerparity.machine.max_memory import STAND_IN_COPIES, most_at_once, size_text
from layerparity.plan.fit import FitReport
from layerparity.plan.placement import Placement, Share
from layerparity.plan.question import STREAM, Question
from layerparity.plan.sharding_limits import LIMIT
from layerparity.plan.survey import Surveyed
from layerparity.plan.weights import ranges

_MOST_DIVISOR = 64
_STAND_IN = "XLA:CPU"


def show_placement(question: Question, placement: Placement) -> None:
    """Print where each module goes and what each device is left with."""
    columns = ("device", "modules", "parameters", "buffers", "KV cache", "activations")
    rows = [_row(share) for share in placement.shares]
    if len(rows) > 1 and question.strategy != STREAM:
        size, cache = placement.size, sum(share.cache for share in placement.shares)
        sums = (f"{size.parameters:,}", f"{size.buffers:,}", console.bytes_text(cache))
        rows.append(("all", "", *sums, "", "", ""))
    if rows:
        console.table("Placement, bytes", (*columns, "of", "headroom"), rows)
    size = question.model.bytes(question.dtype)
    console.say(
        f"{question.model.parameters:,} parameters are {size.parameters:,} bytes "
        f"({console.bytes_text(size.parameters)}) in {question.dtype}"
    )
    if twice := question.model.twice(question.dtype):
        console.say(
            f"the head is tied to the embedding, and a run holds both: {twice:,} bytes more in all"
        )
    keyless = question.model.sizes.without_keys
    if states := [each for each in question.model.stages if Site(each, "in").layer in keyless]:
        console.say(
            f"{ranges(states)} keep no keys and values; a state, which is small and does not grow "
            "with the tokens, is not counted"
        )
    if question.strategy == STREAM:
        _say_streaming(question, placement)
    _say_kept(question)


def _say_kept(question: Question) -> None:
    """Print what the run keeps on disk, and what a golden's noise floors take in memory."""
    kept, text = question.kept, console.bytes_text
    if not kept.references:
        console.say(f"the run keeps about {text(kept.tensors)} on disk")
        return
    console.say(
        f"the golden run keeps about {text(kept.disk)} on disk, {text(kept.references)} of it "
        f"references; its noise floors take about {text(kept.memory)} of the CPU's memory beside "
        "the weights"
    )


def _say_streaming(question: Question, placement: Placement) -> None:
    """Print what the host's memory holds while stages pass through it."""
    whole = replace(question, degree=1)
    together = size_text(most_at_once(whole.weights, whole.new_tokens > 1))
    reader = placement.shares[-1]
    if reader.device == _STAND_IN:
        console.say(
            f"{_STAND_IN} is the host: weights count {STAND_IN_COPIES} times while they move"
        )
    if reader.device.startswith(("cuda", "neuron", "each")):
        console.say(
            f"stages pass one after the other, {together} in the CPU's memory at once; "
            "plan.devices names none (cpu:SIZE), so that was not checked"
        )
    elif reader.at_once > 1:
        console.say("stages pass one after the other; the next is read while one computes")
    else:
        console.say(
            f"stages pass one after the other; two in a row are {together}: nothing is read ahead"
        )


def show_survey(rows: Sequence[Surveyed], dtype: str) -> None:
    """Print which common machines hold the model."""
    columns = ("machine", "devices", "needed", "headroom", "tightest device", "fits", "note")
    table = []
    for row in rows:
        machine = row.machine
        # device_map= is for GPUs.
        way = f", device_map={row.way}" if machine.cores == 1 else ""
        cells = (
            machine.name,
            f"{machine.count} x {console.bytes_text(machine.each)}",
            console.bytes_text(row.needed),
            signed(row.headroom),
            "" if row.tightest is None else signed(row.tightest),
            f"yes{way}" if row.fits else "no",
            row.note,
        )
        table.append(cells)
    console.table(f"Common machines, {dtype}, whole blocks", columns, table)


def show_sharding(report: FitReport) -> None:
    """Print what the Neuron compiler would refuse, and what splits evenly where nothing pads."""
    limit, large, degree = console.bytes_text(LIMIT), report.too_large, report.degree
    if large:
        rows = [
            (row.name, str(list(row.shape)), console.bytes_text(row.bytes), row.degree or "none")
            for row in large
        ]
        columns = ("weight", "shape", "bytes", "smallest tp_degree")
        console.table(f"Above the Neuron compiler's {limit} for one tensor", columns, rows)
    else:
        console.say(f"No tensor is above the Neuron compiler's {limit}.")
    if report.question.nxdi:
        return
    columns = ("size", "is", f"tp_degree={degree} divides it", "divisors")
    sizes = []
    for size in report.sizes:
        divisors = [each for each in size.divisors if each <= _MOST_DIVISOR]
        more = ", ..." if len(divisors) < len(size.divisors) else ""
        divides = "yes" if size.size % degree == 0 else "no"
        sizes.append((size.what, size.size, divides, _listed(divisors) + more))
    console.table("Tensor parallelism", columns, sizes)
    console.say(f"all but experts are divided by tp_degree={_listed(report.degrees)}")


def _row(share: Share) -> tuple[str, ...]:
    modules = ranges(share.stages) or "computes what waits below"
    if share.at_once:
        modules = f"{('one', 'two')[share.at_once - 1]} at a time; largest: {modules}"
    capacity = "" if share.device == "disk" else console.bytes_text(share.capacity)
    return (
        share.device,
        modules,
        f"{share.size.parameters:,}",
        f"{share.size.buffers:,}",
        console.bytes_text(share.cache),
        console.bytes_text(share.activations),
        capacity,
        "waits" if share.waits else signed(share.headroom),
    )


def signed(size: int) -> str:
    """Return bytes as a person reads them, of which there may be less than none."""
    return f"{'-' if size < 0 else ''}{console.bytes_text(abs(size))}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(each) for each in numbers)
