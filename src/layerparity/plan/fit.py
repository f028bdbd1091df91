"""Decide whether a question's model fits, and say what stands in the way, with the cures.

A cure is found by asking again with one thing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any

from layerparity.anatomy.shards import Misfit
from layerparity.ground.errors import UserError
from layerparity.machine.max_memory import SHARE, SPREAD, WORK, room_for_weights, size_text
from layerparity.machine.memory import host_memory
from layerparity.making.needs import ITEMSIZE
from layerparity.plan.core_share import widths_of
from layerparity.plan.deployments import CoreCost, Deployment, cost_of, degrees_of, deployments
from layerparity.plan.devices import Devices
from layerparity.plan.placement import Placement, place
from layerparity.plan.question import STREAM, Question
from layerparity.plan.sharding_limits import LIMIT, Divided, TooLarge, degrees, divided, too_large
from layerparity.plan.survey import Surveyed, survey
from layerparity.plan.weights import ranges

SCHEMA = 2
_NARROW = "bfloat16"
_FEWEST_TOKENS = 128
# Past the first number of devices that is large enough, a few more make up for uneven blocks.
_TRIES = 12


@dataclass(frozen=True)
class FitReport:
    """Where a question's stages go, which machines hold it, and what does not split.

    ``degree`` is the tp_degree asked for, ``degrees`` are those that divide the architecture. Of
    Neuron cores, over which NxDI lays it, they are those that NxDI takes; ``misfits`` is what the
    asked one does not divide, ``cost`` what a core pays, and ``instances`` stand for ``machines``.
    """

    question: Question
    placement: Placement
    machines: Sequence[Surveyed]
    too_large: Sequence[TooLarge]
    sizes: Sequence[Divided]
    degrees: Sequence[int]
    degree: int = 1
    misfits: Sequence[Misfit] = ()
    cost: CoreCost | None = None
    instances: Sequence[Deployment] = ()


def fit_of(question: Question, degree: int) -> FitReport:
    """Place a question's stages, and hold its model against common machines and every tp_degree."""
    sizes = question.model.sizes
    weights = [weight for each in question.model.weights.values() for weight in each]
    fitting = degrees_of(question) if question.nxdi else degrees(sizes)
    large = too_large(weights, question.dtype, fitting)
    report = FitReport(question, place(question), (), large, divided(sizes), fitting, degree)
    if not question.nxdi:
        return replace(report, machines=survey(question))
    least = max((row.degree or 0 for row in large), default=0)
    return replace(
        report,
        misfits=widths_of(sizes, weights).misfits(degree, question.ep),
        cost=cost_of(question),
        instances=deployments(question, [each for each in fitting if each >= least]),
    )


def problems_of(report: FitReport) -> list[str]:
    """Return what stands in the way, each with its cure."""
    problems, question, degree = [], report.question, report.degree
    if not report.placement.fits:
        problems.append(f"{why_not(report.placement)} Cure: {', or '.join(cures(question))}.")
    free = host_memory().free
    if not question.devices.pretended and question.kept.memory > free:
        problems.append(
            f"The golden's noise floors take about {size_text(question.kept.memory)} of memory, "
            f"and {size_text(free)} is free. Cure: fewer tokens, capture=default, "
            "capture.tokens=1024, or reference.make=false for a golden without floors."
        )
    for misfit in report.misfits:
        problems.append(_refusal(misfit, report))
    if not question.nxdi and degree not in report.degrees:
        known = ", ".join(map(str, report.degrees))
        problems.append(f"tp_degree={degree} does not split this model evenly: use one of {known}.")
    for row in report.too_large if question.one_device and not question.gpus else ():
        if row.degree is None or row.degree > degree:
            cure = f"use tp_degree={row.degree}" if row.degree else "no tp_degree clears it"
            problems.append(f"{row.name} is too large for the Neuron compiler: {cure}.")
    return problems


def _refusal(misfit: Misfit, report: FitReport) -> str:
    """Return that NxDI does not take a size, with the nearest degrees that it takes."""
    ep, below = report.question.ep, [each for each in report.degrees if each < report.degree]
    above = [each for each in report.degrees if each > report.degree]
    near = " or ".join(f"tp_degree={each}" for each in (*below[-1:], *above[:1]))
    cure = f"{near} with moe_ep_degree={ep}" if ep > 1 else near
    if misfit.by == "moe_ep_degree" or not near:
        cure = f"moe_ep_degree={gcd(misfit.size, ep)}"
    return (
        f"{misfit.by}={misfit.part} does not divide {misfit.size} ({misfit.what}), which NxDI does "
        f"not pad. Cure: {cure}."
    )


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
    cost, instances = report.cost, report.instances
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
        "moe_ep_degree": question.ep,
        "kept": asdict(question.kept),
        "parameters": question.model.parameters,
        "parameter_bytes": size.parameters,
        "buffer_bytes": size.buffers,
        "devices": [asdict(each) | _ends(each.headroom, each.fits) for each in shares],
        "machines": [asdict(each) | _ends(each.headroom, each.fits) for each in machines],
        "core": None if cost is None else asdict(cost),
        "instances": [
            {"instance": each.instance.name, "lnc": each.lnc, "cores": each.cores}
            | {"each": each.each, "needed": each.needed, "smallest_tp_degree": each.smallest}
            | _ends(each.headroom, each.fits)
            for each in instances
        ],
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
    if question.nxdi and not texts:
        texts = list(_other_instance(question))
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
    if question.nxdi:
        for degree in degrees_of(question, question.degree + 1):
            if degree <= len(question.devices.sizes):
                yield f"tp_degree={degree}", replace(question, degree=degree)
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


def _other_instance(question: Question) -> Iterator[str]:
    """Yield the first known instance that holds the model, with its smallest tp_degree."""
    for row in deployments(question, degrees_of(question)):
        if row.smallest is not None:
            lnc = f" plan.lnc={row.lnc}" if row.lnc != row.instance.usual_lnc else ""
            yield f"plan.devices={row.instance.name}{lnc} tp_degree={row.smallest}"
            return


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
