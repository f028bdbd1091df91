"""The GPUs of this machine by torch: what a run calls them, and how full they are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.machine import nvidia
from layerparity.machine.max_memory import size_text


@dataclass(frozen=True)
class Gpu:
    """One GPU: its index, its name, and its bytes of memory."""

    index: int
    name: str
    total: int


@dataclass(frozen=True)
class DeviceMemory:
    """One line of the memory table: modules put on a device, and its bytes.

    On a GPU ``allocated`` and ``reserved`` are torch's; on ``cpu`` and ``disk`` allocated are the
    weights put there, and reserved what the process or the offload folder holds.
    """

    device: str
    modules: int
    allocated: int
    reserved: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.device}: {self.modules} module{'' if self.modules == 1 else 's'}, "
            f"{bytes_text(self.allocated)} allocated, {bytes_text(self.reserved)} reserved of "
            f"{bytes_text(self.total)}"
        )


def gpus() -> list[Gpu]:
    """Return the GPUs torch can use here."""
    indices = range(torch.cuda.device_count())
    properties = [torch.cuda.get_device_properties(index) for index in indices]
    return [Gpu(index, its.name, its.total_memory) for index, its in enumerate(properties)]


def free_gpu_memory() -> list[int]:
    """Return the free bytes of every GPU, by index. Raises UserError for one that is not to be had.

    The first that a process asks of a GPU opens a context on it: that takes memory there, and a
    GPU that others hold for themselves refuses it.
    """
    try:
        return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    except torch.AcceleratorError as error:
        why = str(error).partition("\n")[0]
        raise UserError(
            f"the GPU cannot be opened: {why}",
            "nvidia-smi shows who holds it and whether it works; device_map=cpu goes without it.",
        ) from error


def label(devices: Sequence[str], names: Sequence[str]) -> str:
    """Return what a run ran on: ``cpu``, ``cuda:0 NVIDIA H200``, ``cuda:0-7 8x NVIDIA H200``.

    ``names`` are the names of all GPUs by index.
    """
    used = sorted(int(device.partition(":")[2]) for device in set(devices) if device != "cpu")
    if not used:
        return "cpu"
    kinds = [names[index] for index in used]
    counted = [
        f"{kinds.count(kind)}x {kind}" if len(kinds) > 1 else kind for kind in dict.fromkeys(kinds)
    ]
    # Indices in a row are a span: 0-3,6.
    spans: list[list[int]] = []
    for index in used:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    where = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"cuda:{where} {', '.join(counted)}"


def device_memory(device: str, modules: int, put: int, folder: Path | None) -> DeviceMemory:
    """Return the state of one device; ``put`` are the bytes of weights sent there by this run."""
    if device == "cpu":
        resident = psutil.Process().memory_info().rss
        return DeviceMemory(device, modules, put, resident, psutil.virtual_memory().total)
    if device == "disk":
        files = folder.rglob("*") if folder is not None else ()
        taken = sum(file.stat().st_size for file in files if file.is_file())
        total = shutil.disk_usage(folder).total if folder is not None else 0
        return DeviceMemory(device, modules, put, taken, total)
    total = torch.cuda.get_device_properties(device).total_memory
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return DeviceMemory(device, modules, allocated, reserved, total)


def facts(present: Sequence[Gpu]) -> dict[str, str]:
    """Return the machine as tags: these GPUs, memory, driver and CUDA versions, CPU, threads."""
    tags = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": str(torch.get_num_threads()),
    }
    if present:
        devices, names = [f"cuda:{gpu.index}" for gpu in present], [gpu.name for gpu in present]
        tags["gpu_count"] = str(len(present))
        tags["gpus"] = label(devices, names)
        tags["gpu_memory"] = ", ".join(size_text(gpu.total) for gpu in present)
        tags["cuda"] = str(torch.version.cuda)
        tags["cudnn"] = str(torch.backends.cudnn.version())
        tags["driver"] = nvidia.driver_version()
    return tags
