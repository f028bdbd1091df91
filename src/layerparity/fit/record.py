"""Record: a plan as JSON, for whoever reads it by program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerparity.fit.compiler import LIMIT, TooLarge
from layerparity.fit.divisibility import Divided
from layerparity.fit.question import Question
from layerparity.fit.share import Answer
from layerparity.fit.survey import Surveyed

SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """Everything a plan found out.

    ``degree`` is the tp_degree asked for, ``degrees`` are those that divide the architecture.
    """

    question: Question
    answer: Answer
    machines: Sequence[Surveyed]
    too_large: Sequence[TooLarge]
    sizes: Sequence[Divided]
    degrees: Sequence[int]
    degree: int = 1


def record(plan: Plan, problems: Sequence[str]) -> dict[str, Any]:
    """Return a plan for a file; all sizes are bytes."""
    question, size = plan.question, plan.question.model.size(plan.question.dtype)
    shares, machines = plan.answer.shares, plan.machines
    return {
        "schema": SCHEMA,
        "fits": not problems,
        "problems": list(problems),
        "dtype": question.dtype,
        "batch": question.batch,
        "seq_len": question.tokens,
        "new_tokens": question.new_tokens,
        "device_map": question.strategy,
        "tp_degree": plan.degree,
        "parameters": question.model.parameters,
        "parameter_bytes": size.parameters,
        "buffer_bytes": size.buffers,
        "devices": [asdict(each) | _ends(each.headroom, each.fits) for each in shares],
        "machines": [asdict(each) | _ends(each.headroom, each.fits) for each in machines],
        "compiler": {"limit": LIMIT, "too_large": [asdict(each) for each in plan.too_large]},
        "divisibility": [asdict(each) | {"divisors": each.divisors} for each in plan.sizes],
        "tp_degrees": list(plan.degrees),
    }


def _ends(headroom: int, fits: bool) -> dict[str, Any]:
    return {"headroom": headroom, "fits": fits}
