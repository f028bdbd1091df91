"""Survey the common machines: which of them hold a model, placed as whole blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from layerparity.ground.errors import UserError
from layerparity.plan.devices import MACHINES, Devices, Machine
from layerparity.plan.question import Question
from layerparity.plan.sharding_limits import degrees

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
    rows = []
    for machine in MACHINES:
        devices = Devices((machine.each,) * machine.count, 0, pretended=True)
        asked = replace(question, devices=devices, one_device=False, degree=1)
        beside = max(asked.activations.values())
        sizes = {stage: asked.weights[stage] + asked.cache[stage] for stage in asked.weights}
        ways = ((way, _bytes_by_device(asked, sizes, machine.each - beside, way)) for way in _WAYS)
        way, loads = next(((way, loads) for way, loads in ways if loads), ("", {}))
        # Where nothing fits, every device would still compute.
        used = len(loads) or machine.count
        needed = sum(sizes.values()) + used * beside
        tightest = machine.each - beside - max(loads.values()) if loads else None
        note = _note(asked, machine, sizes, beside, bool(loads))
        rows.append(Surveyed(machine, needed, way, tightest, note))
    return rows


def _bytes_by_device(
    question: Question, sizes: Mapping[str, int], room: int, strategy: str
) -> dict[str, int]:
    """Return the bytes on each device in use; nothing where a stage finds no place."""
    from layerparity.machine.placement import plan_devices

    memory: dict[int | str, int] = dict.fromkeys(range(len(question.devices.sizes)), room)
    if room <= 0:
        return {}
    try:
        chosen = plan_devices(sizes, strategy, memory | {"cpu": 0}, question.model.blocks)
    except UserError:
        return {}
    loads: dict[str, int] = {}
    for stage, device in chosen.items():
        loads[device] = loads.get(device, 0) + sizes[stage]
    return loads if all(device.startswith("cuda") for device in loads) else {}


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
