"""Survey: which of the common machines hold a model, placed as whole blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from layerparity.anatomy.sizes import ModelSizes
from layerparity.ground.errors import UserError
from layerparity.machine.sharding import common_divisors
from layerparity.plan.devices import MACHINES, Devices, Machine
from layerparity.plan.question import Question
from layerparity.plan.weights import Weight, ranges

# The even way first: it leaves every device the same room.
_WAYS = ("balanced", "sequential")


@dataclass(frozen=True)
class Surveyed:
    """A machine, the bytes a model needs of it, and by which ``device_map`` it holds the model.

    ``way`` is empty where it does not; ``tightest`` is then None, else the least that is left on
    a device in use. ``headroom`` is that of all devices together.
    """

    machine: Machine
    needed: int
    way: str
    tightest: int | None
    note: str

    @property
    def headroom(self) -> int:
        """What is left of all the machine's memory; below 0 where it is not enough."""
        return self.machine.total - self.needed

    @property
    def fits(self) -> bool:
        """Whether the machine holds the model."""
        return bool(self.way)


def survey(question: Question) -> list[Surveyed]:
    """Hold a question's model, dtype and batch against every common machine, by whole blocks.

    Every device in use keeps room for the largest stage's activations beside its own weights and
    cache. Chips of several cores are taken whole.
    """
    return [_surveyed(question, machine) for machine in MACHINES]


def _surveyed(question: Question, machine: Machine) -> Surveyed:
    devices = Devices((machine.each,) * machine.count, 0, pretended=True)
    asked = replace(question, devices=devices, neuron=False, degree=1)
    beside = max(asked.activations.values())
    sizes = {stage: asked.weights[stage] + asked.cache[stage] for stage in asked.weights}
    found = ((way, _held(asked, sizes, machine.each - beside, way)) for way in _WAYS)
    way, held = next(((way, held) for way, held in found if held), ("", {}))
    # Where nothing fits, every device would still compute.
    used = len(held) or machine.count
    needed = sum(sizes.values()) + used * beside
    tightest = machine.each - beside - max(held.values()) if held else None
    return Surveyed(
        machine, needed, way, tightest, _note(asked, machine, sizes, beside, bool(held))
    )


def _held(question: Question, sizes: Mapping[str, int], room: int, strategy: str) -> dict[str, int]:
    """Return the bytes on each device in use; nothing where a stage finds no place."""
    from layerparity.machine.placement import plan_devices

    memory: dict[int | str, int] = dict.fromkeys(range(len(question.devices.sizes)), room)
    if room <= 0:
        return {}
    try:
        chosen = plan_devices(sizes, strategy, memory | {"cpu": 0}, question.model.blocks)
    except UserError:
        return {}
    held: dict[str, int] = {}
    for stage, device in chosen.items():
        held[device] = held.get(device, 0) + sizes[stage]
    return held if all(device.startswith("cuda") for device in held) else {}


def _note(
    question: Question, machine: Machine, sizes: Mapping[str, int], beside: int, fits: bool
) -> str:
    largest, room = max(sizes.values()), machine.each - beside
    if not fits and largest > room:
        return "one block is larger than a device"
    if not fits and sum(sizes.values()) <= room * machine.count:
        return f"enough in all, but only {room // largest} whole blocks on a device"
    if machine.cores == 1 or not fits:
        return ""
    splits = machine.cores in degrees(question.model.sizes)
    verb = "splits" if splits else "does not split"
    return f"{machine.cores} cores a chip: tp_degree={machine.cores} {verb} a block evenly"


@dataclass(frozen=True)
class Divided:
    """One size of an architecture, and the degrees that divide it."""

    what: str
    size: int

    @property
    def divisors(self) -> list[int]:
        """Every number that divides it, ascending."""
        return common_divisors(self.size)


def divided(sizes: ModelSizes) -> list[Divided]:
    """Return what tensor parallelism divides; experts, which expert parallelism does, come last."""
    rows = [Divided(what, size) for what, size in sizes.divided.items()]
    return [*rows, Divided("experts", sizes.experts)] if sizes.experts else rows


def degrees(sizes: ModelSizes) -> list[int]:
    """Return every tp_degree that divides heads, KV heads and intermediate sizes, ascending."""
    return common_divisors(*sizes.divided.values())


# neuronx-cc refuses a single tensor of more than 4 GB. Where it draws the line between 4 * 10^9 and
# 2^32 is not said, so the smaller is taken.
LIMIT = 4 * 10**9


@dataclass(frozen=True)
class TooLarge:
    """A weight above the limit: where it is, its shape and bytes, the smallest degree that helps.

    ``degree`` is None where no degree that divides the architecture is enough.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    degree: int | None


def too_large(weights: Iterable[Weight], dtype: str, degrees: Sequence[int]) -> list[TooLarge]:
    """Return every weight above the limit, equal ones of several blocks as one.

    ``degrees`` are those that divide the architecture, ascending.
    """
    alike: dict[tuple[str, tuple[int, ...], int], list[str]] = {}
    for weight in weights:
        size = weight.bytes(dtype)
        if size > LIMIT:
            stage, inside = _split(weight.name)
            alike.setdefault((inside, weight.shape, size), []).append(stage)
    return [
        TooLarge(f"{ranges(stages)}.{inside}", shape, size, smallest(size, degrees))
        for (inside, shape, size), stages in alike.items()
    ]


def smallest(size: int, degrees: Sequence[int]) -> int | None:
    """Return the smallest of some degrees that brings a tensor's shards under the limit."""
    return next((each for each in degrees if size <= LIMIT * each), None)


def _split(name: str) -> tuple[str, str]:
    """Split ``layers.3.mlp.x`` after the block, any other name after its first word."""
    words = name.split(".")
    count = 2 if words[0] == "layers" else 1
    return ".".join(words[:count]), ".".join(words[count:])
