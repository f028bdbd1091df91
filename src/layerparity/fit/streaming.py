"""Streaming: what is in memory at once of stages that are read one after the other.

The rule is that of a run: the memory of the CPU holds the stage that was just read and the next
one, or one alone where two are too many; a device beside it holds the stage that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerparity.backends._streaming import largest_together, most_at_once
from layerparity.fit.question import Question
from layerparity.fit.share import Share
from layerparity.fit.weights import Size


def streamed(question: Question, whole: Share, host: int) -> tuple[Share, ...]:
    """Return the share of the device that computes, and that of the CPU, which may hold ``host``.

    ``whole`` is the device's share if all stages stayed there. Of a CPU of which nothing is known
    (0 bytes) there is no share.
    """
    largest = max(question.weights, key=lambda stage: question.weights[stage])
    device = replace(whole, stages=(largest,), size=question.sizes[largest], at_once=1)
    if not host:
        return (device,)
    read = _read(replace(question, degree=1), host)
    size = _size(replace(question, degree=1), read)
    capacity = question.devices.cpu or host
    return device, Share("cpu", read, size, 0, 0, capacity, host, at_once=len(read))


def streamed_on_host(question: Question, device: str, limit: int, copies: float = 1) -> Share:
    """Return the one share of a run that reads and computes in the CPU's memory.

    There are so many ``copies`` of weights while they move.
    """
    read = _read(question, limit, copies)
    held = _size(question, read)
    size = Size(int(copies * held.parameters), int(copies * held.buffers))
    cache, activations = sum(question.cache.values()), max(question.activations.values())
    capacity = question.devices.cpu
    return Share(device, read, size, cache, activations, capacity, limit, at_once=len(read))


def _read(question: Question, limit: int, copies: float = 1) -> tuple[str, ...]:
    """Return the stages of which a run's reader holds the most at once."""
    sizes = {stage: int(copies * size) for stage, size in question.weights.items()}
    # A token that follows another begins with the first stage again.
    again = question.new_tokens > 1
    if most_at_once(sizes, again) <= limit:
        return largest_together(sizes, again)
    return (max(sizes, key=lambda stage: sizes[stage]),)


def _size(question: Question, stages: Sequence[str]) -> Size:
    return sum((question.sizes[stage] for stage in stages), Size())
