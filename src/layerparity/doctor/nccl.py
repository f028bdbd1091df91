"""NCCL: what processes on several GPUs talk through; one process with several GPUs needs none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor import _probe
from layerparity.doctor._versions import PAIR
from layerparity.doctor.base import Check, Result, Section, ok, warning
from layerparity.machine import nvidia

if TYPE_CHECKING:
    from layerparity.settings.config import Config


def look(config: Config) -> Iterator[Result]:
    """Yield one line; only several GPUs make a lack of it worth a warning."""
    try:
        version = _probe.torch_facts()["nccl"]
    except _probe.NoAnswerError as error:
        yield warning("nccl", f"torch cannot be asked: {error}", "mend torch first, see its line")
        return
    if version:
        yield ok("nccl", f"{version}, built into torch")
    elif len(nvidia.gpu_names()) > 1:
        cure = f"install torch {PAIR['torch']} built for CUDA; device_map=balanced works without"
        yield warning("nccl", "torch was built without it", cure)
    else:
        yield ok("nccl", "torch was built without it; there are not two GPUs to need it")


CHECK = Check(Section.DEVICES, look)
