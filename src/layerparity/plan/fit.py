"""Decide whether a question's model fits, and say what stands in the way, with the cures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerparity.machine.max_memory import size_text
from layerparity.plan.cures import cures
from layerparity.plan.placement import Placement, place
from layerparity.plan.question import Question
from layerparity.plan.sharding_limits import LIMIT, Divided, TooLarge, degrees, divided, too_large
from layerparity.plan.survey import Surveyed, survey
from layerparity.plan.weights import ranges

SCHEMA = 1


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
