"""GPUs: which the driver shows, which torch can use, and how much of their memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from layerparity.doctor import _probe
from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.ground.console import bytes_text
from layerparity.machine import nvidia

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# Below this share of free memory somebody else is at work on the GPU.
_FREE = 0.9


def look(config: Config) -> Iterator[Result]:
    """Yield a line for each GPU, and one where driver and torch do not see the same."""
    shown = nvidia.gpu_names()
    try:
        facts = _probe.torch_facts()
    except _probe.NoAnswerError as error:
        yield problem("gpus", f"torch cannot be asked: {error}", "mend torch first, see its line")
        return
    usable = facts["gpus"]
    if not shown and not usable:
        yield _none(config)
    if len(usable) < len(shown):
        yield _lost(len(shown), facts)
    for index, gpu in enumerate(usable):
        yield _gpu(index, gpu)


def _none(config: Config) -> Result:
    if config.device_map.strategy.startswith("cuda"):
        found = f"none here, and device_map={config.device_map.strategy} needs one"
        return problem("gpus", found, "use device_map=cpu")
    return ok("gpus", "none here: backend=gpu runs on the CPU")


def _lost(shown: int, facts: dict[str, Any]) -> Result:
    found = f"the driver ({nvidia.driver_version()}) shows {shown}, torch can use "
    found += f"{len(facts['gpus'])}"
    if not facts["cuda"]:
        return problem("gpus", f"{found}: it is built without CUDA", "install torch built for CUDA")
    cure = f"install a driver for CUDA {facts['cuda']}, or the torch that fits the driver"
    return problem("gpus", found, cure)


def _gpu(index: int, gpu: dict[str, Any]) -> Result:
    found = f"{gpu['name']}, {bytes_text(gpu['free'])} free of {bytes_text(gpu['total'])}"
    if gpu["free"] < _FREE * gpu["total"]:
        cure = f"nvidia-smi --id={index} names who holds it; or leave it out by max_memory="
        return warning(f"gpu {index}", found, cure)
    return ok(f"gpu {index}", found)


CHECK = Check(Section.DEVICES, look)
