"""Find what to type so that a model fits, by asking again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from layerparity.ground.errors import UserError
from layerparity.machine.max_memory import SHARE, SPREAD, WORK, room_for_weights, size_text
from layerparity.plan.devices import Devices
from layerparity.plan.placement import place
from layerparity.plan.question import STREAM, Question
from layerparity.plan.weights import ITEMSIZE

_NARROW = "bfloat16"
_FEWEST_TOKENS = 128
# Past the first number of devices that is large enough, a few more make up for uneven blocks.
_TRIES = 12


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
