"""Place each stage by accelerate's own planner, and work out whether there is room for it.

The rule is that of a run: the memory of the CPU holds the stage that was just read and the next
one, or one alone where two are too many; a device beside it holds the stage that computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layerparity.ground.errors import UserError
from layerparity.machine.max_memory import (
    SPREAD,
    STAND_IN_COPIES,
    budget,
    check_strategy,
    largest_together,
    most_at_once,
    parse_limits,
    room_for_weights,
)
from layerparity.machine.trainium import smallest_for
from layerparity.plan.question import STREAM, Question
from layerparity.plan.weights import WeightBytes


@dataclass(frozen=True)
class Share:
    """What one device holds, in bytes, of its ``capacity``; ``limit`` is the weights' own.

    ``waits``: the stages do not compute here, and are copied elsewhere whenever they run.
    ``copies`` devices hold such a share each. ``at_once`` is 0 where the stages stay; where they
    stream, so many in a row are here at a time, and ``stages`` are the largest of them.
    """

    device: str
    stages: tuple[str, ...]
    size: WeightBytes
    cache: int
    activations: int
    capacity: int
    limit: int
    waits: bool = False
    copies: int = 1
    at_once: int = 0

    @property
    def weights(self) -> int:
        """Bytes of parameters and buffers."""
        return self.size.all

    @property
    def headroom(self) -> int:
        """What is left of the capacity; below 0 where it is not enough."""
        return self.capacity - self.weights - self.cache - self.activations

    @property
    def fits(self) -> bool:
        """Whether the stages are where they compute, with room for what they make."""
        return not self.waits and self.headroom >= 0 and self.weights <= self.limit


@dataclass(frozen=True)
class Placement:
    """The shares of all devices in use; none where ``refused`` says why nothing can be placed."""

    shares: tuple[Share, ...]
    refused: str = ""

    @property
    def size(self) -> WeightBytes:
        """What all devices together hold."""
        held = (share.size for share in self.shares for _ in range(share.copies))
        return sum(held, WeightBytes())

    @property
    def fits(self) -> bool:
        """Whether every share fits."""
        return bool(self.shares) and all(share.fits for share in self.shares)


def place(question: Question) -> Placement:
    """Place a question's stages. Raises UserError for a strategy or limit that makes no sense."""
    if question.one_device:
        return Placement(_on_one_device(question))
    if question.strategy == STREAM:
        return Placement(_streams(question))
    from layerparity.machine.placement import execution_device, plan_devices

    strategy, sizes = question.strategy, question.weights
    check_strategy(strategy)
    memory = _budget(question, strategy)
    if strategy in SPREAD:
        try:
            chosen = plan_devices(sizes, strategy, memory, question.model.blocks)
        except UserError as error:
            # What it then advises is for a run; a plan has cures of its own.
            return Placement((), f"{error.found}." if error.found else str(error))
    else:
        chosen = dict.fromkeys(sizes, strategy)
    runs_on = {stage: execution_device(chosen[stage], memory) for stage in sizes}

    def order(device: str) -> tuple[int, int]:
        kind, _, index = device.partition(":")
        return ("cuda", "cpu", "disk").index(kind), int(index or 0)

    # What waits elsewhere computes on the first device, which may hold no weights of its own.
    used = dict.fromkeys([*chosen.values(), *runs_on.values()])
    return Placement(
        tuple(_share(question, each, chosen, runs_on, memory) for each in sorted(used, key=order))
    )


def _share(
    question: Question,
    device: str,
    chosen: Mapping[str, str],
    runs_on: Mapping[str, str],
    memory: Mapping[int | str, int],
) -> Share:
    stages = tuple(stage for stage, its in chosen.items() if its == device)
    computed = [stage for stage, its in runs_on.items() if its == device]
    key = int(device.partition(":")[2]) if device.startswith("cuda") else device
    capacity = _capacity(question, key)
    return Share(
        device,
        stages,
        _size(question, stages),
        sum(question.cache[stage] for stage in computed),
        max((question.activations[stage] for stage in computed), default=0),
        capacity,
        memory.get(key, capacity),
        waits=any(runs_on[stage] != device for stage in stages),
    )


def _capacity(question: Question, key: int | str) -> int:
    """Return a device's bytes; a disk has as many as it takes."""
    if isinstance(key, int):
        return question.devices.sizes[key]
    return question.devices.cpu if key == "cpu" else sum(question.weights.values())


def _streams(question: Question) -> tuple[Share, ...]:
    memory, limits = _budget(question, STREAM), parse_limits(question.max_memory)
    host = memory["cpu"] if limits.cpu is not None else room_for_weights(memory["cpu"])
    first = min((each for each in memory if isinstance(each, int)), default=None)
    if first is None:
        return (streamed_on_host(question, "cpu", host),)
    whole = _whole(question, f"cuda:{first}", first)
    return streamed(question, replace(whole, limit=room_for_weights(memory[first])), host)


def _on_one_device(question: Question) -> tuple[Share, ...]:
    """Return the share of the first device, or of each of the first ``degree`` devices."""
    if question.max_memory is not None:
        if question.gpus:
            raise UserError(
                f"max_memory places whole stages, and tp_degree={question.degree} splits each",
                "leave one of them out.",
            )
        raise UserError("max_memory is for backend=gpu: leave it out with backend=neuron.")
    sizes, degree = question.devices.sizes[: question.degree], question.degree
    if sizes and len(sizes) < degree:
        raise _too_few(question, len(sizes))
    streams, host = question.strategy == STREAM, room_for_weights(question.devices.cpu)
    if not sizes:
        # All parts are in one memory.
        alone, cpu = replace(question, degree=1), "cpu" if question.gpus else "XLA:CPU"
        if streams:
            return (streamed_on_host(alone, cpu, host, STAND_IN_COPIES),)
        return (_whole(alone, cpu, "cpu"),)
    kind = "cuda" if question.gpus else "neuron"
    name = f"{kind}:0" if degree == 1 else f"each of {kind}:0..{degree - 1}"
    smallest = sizes.index(min(sizes))
    share = replace(_whole(question, name, smallest), copies=degree)
    return streamed(question, share, host) if streams else (share,)


def _too_few(question: Question, there: int) -> UserError:
    larger = smallest_for(question.degree) if question.devices.instance is not None else None
    cure = larger.name if larger is not None else f"{question.degree}x24GiB"
    return UserError(
        f"tp_degree={question.degree} wants as many devices, and there are {there}: give "
        f"plan.devices={cure}, say."
    )


def _whole(question: Question, device: str, key: int | str) -> Share:
    """Return the one share of a run whose stages all compute on one device."""
    size = sum(question.sizes.values(), WeightBytes())
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
    size = WeightBytes(int(copies * held.parameters), int(copies * held.buffers))
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


def _size(question: Question, stages: Sequence[str]) -> WeightBytes:
    return sum((question.sizes[stage] for stage in stages), WeightBytes())
