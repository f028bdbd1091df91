"""Decide whether a question's model fits, and say what stands in the way, with the cures.

A cure is found by asking again with one thing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.machine.max_memory import SHARE, SPREAD, WORK, room_for_weights, size_text
from layerparity.plan.devices import Devices
from layerparity.plan.placement import Placement, place
from layerparity.plan.question import STREAM, Question
from layerparity.plan.sharding_limits import LIMIT, Divided, TooLarge, degrees, divided, too_large
from layerparity.plan.survey import Surveyed, survey
from layerparity.plan.weights import ranges
from layerparity.run.needs import ITEMSIZE

SCHEMA = 1
_NARROW = "bfloat16"
_FEWEST_TOKENS = 128
# Past the first number of devices that is large enough, a few more make up for uneven blocks.
_TRIES = 12


@dataclass(frozen=True)
class FitReport:
    """Where a question's stages go, which machines hold it, and what does not split.

    ``degree`` is the tp_degree asked for, ``degrees`` are those that divide the architecture.
    """

    question: Question
    placement: Placement
    machines: Sequence[Surveyed]
    too_large: Sequence[TooLarge]
    sizes: Sequence[Divided]
    degrees: Sequence[int]
    degree: int = 1


def fit_of(question: Question, degree: int) -> FitReport:
    """Place a question's stages, and hold its model against common machines and every tp_degree."""
    sizes, fitting = question.model.sizes, degrees(question.model.sizes)
    weights = (weight for each in question.model.weights.values() for weight in each)
    large = too_large(weights, question.dtype, fitting)
    return FitReport(
        question, place(question), survey(question), large, divided(sizes), fitting, degree
    )


def problems_of(report: FitReport) -> list[str]:
    """Return what stands in the way, each with its cure."""
    problems, question, degree = [], report.question, report.degree
    if not report.placement.fits:
        problems.append(f"{why_not(report.placement)} Cure: {', or '.join(cures(question))}.")
    if degree not in report.degrees:
        known = ", ".join(map(str, report.degrees))
        problems.append(f"tp_degree={degree} does not split this model evenly: use one of {known}.")
    for row in report.too_large if question.one_device else ():
        if row.degree is None or row.degree > degree:
            cure = f"use tp_degree={row.degree}" if row.degree else "no tp_degree clears it"
            problems.append(f"{row.name} is too large for the Neuron compiler: {cure}.")
    return problems


def why_not(placement: Placement) -> str:
    """Return in one sentence why stages do not fit; empty where it does."""
    if placement.refused:
        return placement.refused
    for share in placement.shares:
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


def record(report: FitReport, problems: Sequence[str]) -> dict[str, Any]:
    """Return a report for a file; all sizes are bytes."""
    question, size = report.question, report.question.model.bytes(report.question.dtype)
    shares, machines = report.placement.shares, report.machines
    return {
        "schema": SCHEMA,
        "fits": not problems,
        "problems": list(problems),
        "dtype": question.dtype,
        "batch": question.batch,
        "seq_len": question.tokens,
        "new_tokens": question.new_tokens,
        "device_map": question.strategy,
        "tp_degree": report.degree,
        "parameters": question.model.parameters,
        "parameter_bytes": size.parameters,
        "buffer_bytes": size.buffers,
        "devices": [asdict(each) | _ends(each.headroom, each.fits) for each in shares],
        "machines": [asdict(each) | _ends(each.headroom, each.fits) for each in machines],
        "compiler": {"limit": LIMIT, "too_large": [asdict(each) for each in report.too_large]},
        "divisibility": [asdict(each) | {"divisors": each.divisors} for each in report.sizes],
        "tp_degrees": list(report.degrees),
    }


def _ends(headroom: int, fits: bool) -> dict[str, Any]:
    return {"headroom": headroom, "fits": fits}


def cures(question: Question) -> list[str]:
    """Return what makes a question fit that does not: the nearest change first, streaming last.

    Every one was tried. Where no setting helps, one says what would.
    """
    near = (text for text, change in _changes(question) if _fits(change))
    texts = [text for text in (next(near, None),) if text is not None]
    if question.strategy != STREAM and _fits(replace(question, strategy=STREAM)):
        texts.append(f"device_map={STREAM}")
    return texts or [_last_resort(question)]


def _last_resort(question: Question) -> str:
    """Return what is left where no setting helps."""
    read, host = max(question.weights.values()), question.devices.cpu
    # One stage at least is in the CPU's memory while it is read.
    if question.strategy == STREAM and host and room_for_weights(int(SHARE * host)) < read:
        beside = " beside the devices" if question.devices.sizes else ""
        return f"more than {size_text(int((read + WORK) / SHARE))} of memory{beside}"
    stages = question.model.stages
    alone = max(question.weights[stage] + question.activations[stage] for stage in stages)
    if alone > max((*question.devices.sizes, question.devices.cpu)):
        return f"a device of more than {size_text(alone)}, which the largest stage alone needs"
    return "fewer blocks: scope=range start=A end=B"


def _fits(question: Question) -> bool:
    try:
        return place(question).fits
    except UserError:
        return False


def _changes(question: Question) -> Iterator[tuple[str, Question]]:
    yield from _other_limits(question)
    for divisor in (2**power for power in range(1, 9)):
        tokens = question.tokens // divisor
        if tokens >= _FEWEST_TOKENS:
            yield f"seq_len={tokens}", replace(question, tokens=tokens)
    if ITEMSIZE[question.dtype] > ITEMSIZE[_NARROW]:
        narrow = replace(question, dtype=_NARROW)
        yield f"dtype={_NARROW}", narrow
        for text, change in _other_limits(narrow):
            yield f"dtype={_NARROW} {text}", change
    yield from _more_devices(question)


def _other_limits(question: Question) -> Iterator[tuple[str, Question]]:
    """Yield other shares of the devices for weights, as much as the rest leaves."""
    sizes, spreads = question.devices.sizes, question.strategy in SPREAD
    if question.one_device or not sizes or not (spreads or question.strategy.startswith("cuda")):
        return
    average = sum(question.cache.values()) // len(sizes)
    for cache in (0, average, 2 * average):
        left = min(sizes) - max(question.activations.values()) - cache
        if left > 10**7:
            text = f"{left // 10**7 / 100:g}GB"
            yield f"max_memory={text}", replace(question, max_memory=text)


def _more_devices(question: Question) -> Iterator[tuple[str, Question]]:
    sizes = question.devices.sizes
    if question.one_device or question.strategy not in SPREAD or not sizes or len(set(sizes)) > 1:
        return
    needed = sum(question.weights.values()) + sum(question.cache.values())
    first = max(len(sizes) + 1, -(-needed // sizes[0]))
    for count in range(first, first + _TRIES):
        devices = Devices(sizes[:1] * count, question.devices.cpu, question.devices.pretended)
        more = replace(question, devices=devices)
        named = f"{count} devices of {size_text(sizes[0])}"
        yield named, more
        for text, change in _other_limits(more):
            yield f"{named} and {text}", change
