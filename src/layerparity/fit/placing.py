"""Placing: where each stage goes by accelerate's own planner, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from layerparity.backends._gpu.memory import (
    SPREAD,
    budget,
    check_strategy,
    parse_limits,
)
from layerparity.backends._streaming import STAND_IN_COPIES, room_for_weights
from layerparity.errors import UserError
from layerparity.fit.question import STREAM, Question
from layerparity.fit.share import Answer, Share
from layerparity.fit.streaming import streamed, streamed_on_host
from layerparity.fit.weights import Size


def answer(question: Question) -> Answer:
    """Place a question's stages. Raises UserError for a strategy or limit that makes no sense."""
    if question.neuron:
        return Answer(_neuron(question))
    if question.strategy == STREAM:
        return Answer(_streams(question))
    return _planned(question)


def _planned(question: Question) -> Answer:
    from layerparity.backends._gpu.planning import execution_device, plan_devices

    strategy, sizes = question.strategy, question.weights
    check_strategy(strategy)
    memory = _budget(question, strategy)
    if strategy in SPREAD:
        try:
            chosen = plan_devices(sizes, strategy, memory, question.model.blocks)
        except UserError as error:
            # What it then advises is for a run; a plan has cures of its own.
            return Answer((), f"{str(error).partition(': ')[0]}.")
    else:
        chosen = dict.fromkeys(sizes, strategy)
    runs_on = {stage: execution_device(chosen[stage], memory) for stage in sizes}
    # What waits elsewhere computes on the first device, which may hold no weights of its own.
    used = dict.fromkeys([*chosen.values(), *runs_on.values()])
    return Answer(
        tuple(_share(question, each, chosen, runs_on, memory) for each in sorted(used, key=_place))
    )


def _share(
    question: Question,
    device: str,
    chosen: Mapping[str, str],
    runs_on: Mapping[str, str],
    memory: Mapping[int | str, int],
) -> Share:
    held = tuple(stage for stage, its in chosen.items() if its == device)
    computed = [stage for stage, its in runs_on.items() if its == device]
    key = int(device.partition(":")[2]) if device.startswith("cuda") else device
    capacity = _capacity(question, key)
    return Share(
        device,
        held,
        sum((question.sizes[stage] for stage in held), Size()),
        sum(question.cache[stage] for stage in computed),
        max((question.activations[stage] for stage in computed), default=0),
        capacity,
        memory.get(key, capacity),
        waits=any(runs_on[stage] != device for stage in held),
    )


def _capacity(question: Question, key: int | str) -> int:
    """Return a device's bytes; a disk has as many as it takes."""
    if isinstance(key, int):
        return question.devices.sizes[key]
    return question.devices.cpu if key == "cpu" else sum(question.weights.values())


def _place(device: str) -> tuple[int, int]:
    kind, _, index = device.partition(":")
    return ("cuda", "cpu", "disk").index(kind), int(index or 0)


def _streams(question: Question) -> tuple[Share, ...]:
    memory, limits = _budget(question, STREAM), parse_limits(question.max_memory)
    host = memory["cpu"] if limits.cpu is not None else room_for_weights(memory["cpu"])
    first = min((each for each in memory if isinstance(each, int)), default=None)
    if first is None:
        return (streamed_on_host(question, "cpu", host),)
    whole = _whole(question, f"cuda:{first}", first)
    return streamed(question, replace(whole, limit=room_for_weights(memory[first])), host)


def _neuron(question: Question) -> tuple[Share, ...]:
    """Return the share of the first device, or of each of the first ``degree`` devices."""
    if question.max_memory is not None:
        raise UserError("max_memory is for backend=gpu: leave it out with backend=neuron.")
    sizes, degree = question.devices.sizes[: question.degree], question.degree
    if sizes and len(sizes) < degree:
        raise UserError(
            f"tp_degree={degree} wants as many devices, and there are {len(sizes)}: give "
            f"plan.devices={degree}x24GiB, say."
        )
    streams, host = question.strategy == STREAM, room_for_weights(question.devices.cpu)
    if not sizes:
        alone = replace(question, degree=1)
        if streams:
            return (streamed_on_host(alone, "XLA:CPU", host, STAND_IN_COPIES),)
        return (_whole(alone, "XLA:CPU", "cpu"),)
    name = "neuron:0" if degree == 1 else f"each of neuron:0..{degree - 1}"
    smallest = sizes.index(min(sizes))
    share = replace(_whole(question, name, smallest), copies=degree)
    return streamed(question, share, host) if streams else (share,)


def _whole(question: Question, device: str, key: int | str) -> Share:
    """Return the one share of a run whose stages all compute on one device."""
    size = sum(question.sizes.values(), Size())
    cache, activations = sum(question.cache.values()), max(question.activations.values())
    capacity = _capacity(question, key)
    return Share(device, question.model.stages, size, cache, activations, capacity, capacity)


def _budget(question: Question, strategy: str) -> dict[int | str, int]:
    limits, devices = parse_limits(question.max_memory), question.devices
    memory = budget(strategy, limits, devices.sizes, devices.cpu)
    if devices.pretended and not devices.cpu and set(memory) == {"cpu"}:
        raise UserError(
            "This would run on the CPU, and plan.devices names no memory for it: add cpu:500GB, "
            "or use another device_map."
        )
    return memory
