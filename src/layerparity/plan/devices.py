"""Describe the memory a plan is made for: pretended (``8x80GB``), this machine's, common ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerparity.ground.errors import UserError, nearest
from layerparity.machine.max_memory import parse_limits, size_text
from layerparity.machine.trainium import GIB, INSTANCES, Instance, instance_of

_ENTRY = re.compile(r"^(?:(?P<count>\d+)\s*x\s*)?(?P<size>[^:x]+)$", re.IGNORECASE)
_MOST = 1024
_FORMS = (
    "Write plan.devices=8x80GB or 8xH200, or 'plan.devices=\"2x80GB,1x40GB,cpu:500GB\"' with the "
    "memory beside them, or plan.devices=trn2.48xlarge with backend=neuron."
)
GB = 10**9


@dataclass(frozen=True)
class Machine:
    """``count`` accelerators of ``each`` bytes; one consists of ``cores`` that share its memory."""

    name: str
    count: int
    each: int
    cores: int = 1

    @property
    def total(self) -> int:
        """The bytes of all accelerators together."""
        return self.count * self.each


# From the makers' data sheets, in their units: NVIDIA's "A100 Tensor Core GPU" (40 GB, 80 GB),
# "H100 Tensor Core GPU" (80 GB, SXM) and "H200 Tensor Core GPU" (141 GB). A driver reports a few
# per cent more, in powers of two, and keeps some of it. Those of AWS are in `machine.trainium`.
GPUS = {"A100-80": 80 * GB, "A100-40": 40 * GB, "H100": 80 * GB, "H200": 141 * GB}
_COUNTS = {"A100-80": (8,), "A100-40": (8,), "H100": (4, 6), "H200": (1, 8)}
MACHINES = (
    *(Machine(f"{n}x{name}", n, GPUS[name]) for name, counts in _COUNTS.items() for n in counts),
    *(
        Machine(each.name, each.chips, each.each, each.cores)
        for each in reversed(INSTANCES)
        if each.name in ("trn2.48xlarge", "trn1.32xlarge")
    ),
)


@dataclass(frozen=True)
class Devices:
    """Bytes of each accelerator, and of the CPU's memory; what may be used, not what is built in.

    ``pretended`` devices are those of ``plan.devices``. Where they are the logical cores of a
    Neuron ``instance``, ``lnc`` physical ones make up each.
    """

    sizes: tuple[int, ...]
    cpu: int
    pretended: bool = False
    instance: Instance | None = None
    lnc: int = 0

    def describe(self) -> str:
        """Return the devices as a person would: ``2 of 80GB, 1 of 40GB``."""
        if self.instance is not None:
            many = f"{len(self.sizes)} logical cores of {self.sizes[0] / GIB:g} GiB"
            return f"{self.instance.name}, LNC {self.lnc}: {many}"
        kinds = [
            f"{self.sizes.count(size)} of {size_text(size)}" for size in dict.fromkeys(self.sizes)
        ]
        cpu = [f"a CPU with {size_text(self.cpu)}"] if self.cpu else []
        return ", ".join([*kinds, *cpu])


def parse_devices(text: str, lnc: int | None = None) -> Devices:
    """Read ``8x80GB``, ``2xH200``, ``2x80GB,1x40GB,cpu:500GB``; GB is 10^9 bytes and GiB 2^30.

    Without ``cpu:`` there is no memory beside the devices. ``trn2.48xlarge`` is its logical cores,
    of ``lnc`` physical ones each. Raises UserError with the right form.
    """
    instance = instance_of(text)
    if instance is not None:
        return cores_of(instance, lnc)
    if lnc is not None:
        raise UserError(
            f"plan.lnc={lnc} is for an instance",
            f"leave it out, or name one: plan.devices={INSTANCES[-1].name}.",
        )
    sizes: list[int] = []
    cpu: int | None = None
    for part in (each.strip() for each in text.split(",")):
        if part.lower().startswith("cpu:") and cpu is None:
            cpu = _size(part[4:], part)
            continue
        match = _ENTRY.match(part)
        count = int(match["count"] or 1) if match else 0
        if match is None or not 0 < count <= _MOST - len(sizes):
            raise _refusal(part)
        sizes += [_size(match["size"], part)] * count
    return Devices(tuple(sizes), cpu or 0, pretended=True)


def cores_of(instance: Instance, lnc: int | None = None) -> Devices:
    """Return an instance's logical cores; None is the LNC that it usually has.

    Raises UserError for an LNC that it does not have.
    """
    lnc = instance.checked_lnc(lnc)
    sizes = (instance.core_bytes(lnc),) * instance.logical_cores(lnc)
    return Devices(sizes, 0, pretended=True, instance=instance, lnc=lnc)


def this_machine(ask_gpus: bool) -> Devices:
    """Return the free memory of this machine; its GPUs are not touched unless ``ask_gpus``."""
    from layerparity.machine.gpus import free_gpu_memory
    from layerparity.machine.memory import free_host_memory

    return Devices(tuple(free_gpu_memory()) if ask_gpus else (), free_host_memory())


def _size(text: str, part: str) -> int:
    if text.strip().upper() in GPUS:
        return GPUS[text.strip().upper()]
    try:
        found = parse_limits(text).every
    except UserError:
        found = None
    if not found:
        raise _refusal(part)
    return found


def _refusal(part: str) -> UserError:
    known = [each.name for each in INSTANCES]
    # An instance's family, trn3, is too short to be near to any of its names.
    begun = [name for name in known if part and name.startswith(part.lower())]
    hint = nearest(begun[0] if begun else part.lower(), known)
    return UserError(
        f"plan.devices has '{part}', which is no number of devices of a size.{hint} {_FORMS}"
    )
