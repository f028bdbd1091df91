"""Hold a model against every known Trainium instance, laid over its logical cores as NxDI does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layerparity.anatomy.shards import Heads
from layerparity.machine.trainium import INSTANCES, Instance
from layerparity.plan.core_share import Surplus, widths_of
from layerparity.plan.question import STREAM, Question
from layerparity.plan.weights import StageWeight


@dataclass(frozen=True)
class CoreCost:
    """What one core holds beyond an even part of a model, in bytes, by cause.

    ``even`` and ``even_cache`` are that even part, of weights and of keys and values.
    """

    even: int
    added: dict[Surplus, int]
    even_cache: int
    added_cache: int


def cost_of(question: Question) -> CoreCost:
    """Return what a core of ``question.degree`` pays for heads and rows that do not divide."""
    weights = list(_weights(question))
    whole = replace(question, degree=1)
    cache, even = sum(question.cache.values()), sum(whole.cache.values()) // question.degree
    return CoreCost(
        sum(weight.bytes(question.dtype) for weight in weights) // question.degree,
        question.layout.added(weights, question.dtype),
        even,
        cache - even,
    )


def degrees_of(question: Question, least: int = 1) -> list[int]:
    """Return every tp_degree that NxDI takes for a question's model, from ``least`` on.

    Those that convert groups of heads are left out: see `Heads.converts`.
    """
    sizes = question.model.sizes
    divide = widths_of(sizes, _weights(question)).degrees(question.ep)
    return [
        degree
        for degree in divide
        if degree >= least and not Heads(sizes.heads, sizes.kv_heads, degree).converts
    ]


@dataclass(frozen=True)
class Deployment:
    """An instance at one LNC, the bytes that a core of the asked tp_degree needs, and of what.

    ``smallest`` is the smallest tp_degree with which the model fits there, None where none does.
    """

    instance: Instance
    lnc: int
    degree: int
    needed: int
    smallest: int | None

    @property
    def cores(self) -> int:
        """Logical cores of the instance."""
        return self.instance.logical_cores(self.lnc)

    @property
    def each(self) -> int:
        """Bytes of a logical core."""
        return self.instance.core_bytes(self.lnc)

    @property
    def headroom(self) -> int:
        """What is left of a core's memory; below 0 where it is not enough."""
        return self.each - self.needed

    @property
    def fits(self) -> bool:
        """Whether there are cores enough, and each has room."""
        return self.cores >= self.degree and self.headroom >= 0


def deployments(question: Question, degrees: Sequence[int]) -> list[Deployment]:
    """Hold a question against every instance at every LNC.

    ``degrees`` are those that NxDI takes and the compiler does not refuse, ascending. The CPU's
    memory beside the cores is not looked at.
    """
    needs = {degree: _needed(replace(question, degree=degree)) for degree in degrees}
    asked = needs.get(question.degree) or _needed(question)
    rows = []
    for instance in INSTANCES:
        for lnc in instance.lncs if instance.surveyed else ():
            cores, each = instance.logical_cores(lnc), instance.core_bytes(lnc)
            enough = (d for d in degrees if d <= cores and needs[d] <= each)
            smallest = next(enough, None)
            rows.append(Deployment(instance, lnc, question.degree, asked, smallest))
    return rows


def _needed(question: Question) -> int:
    """Return the bytes that one core needs: weights, keys and values, activations."""
    weights = question.weights.values()
    held = max(weights) if question.strategy == STREAM else sum(weights)
    return held + sum(question.cache.values()) + max(question.activations.values())


def _weights(question: Question) -> Iterator[StageWeight]:
    return (weight for each in question.model.weights.values() for weight in each)
