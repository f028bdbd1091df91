"""The gpu backend: transformers and accelerate, on the GPUs here, or on the CPU without one.

Nothing heavy is imported until `build`; the rooms behind it are in ``_gpu``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.backends.base import Abilities, DeviceShare, RankDevices
from layerparity.machine import nvidia
from layerparity.machine.device import Affinity, keep_torch_xla_out
from layerparity.settings.config import RunKind
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.backends.base import Backend
    from layerparity.settings.config import Config


@dataclass
class Settings:
    """conf/backend/gpu: ``compile`` runs each stage through torch.compile instead of eagerly."""

    name: str = "gpu"
    compile: bool = key(False, "torch.compile")


def affinity() -> Affinity:
    """Return how well this backend fits; torch is asked only where it is imported already."""
    names = nvidia.gpu_names()
    if "torch" in sys.modules:
        import torch

        # To ask a GPU for its name would open a context on it. Some builds of torch know none, and
        # some GPUs have no driver's files.
        count = torch.cuda.device_count()
        names = [*names, *["a GPU"] * count][:count]
    if not names:
        return Affinity(1, "cpu", "no GPU here: device_map=cpu runs on the CPU")
    return Affinity(2, "cuda", f"{len(names)} GPU{'s' if len(names) > 1 else ''}: {names[0]}")


def abilities(settings: Settings) -> Abilities:
    """Return what torch on GPUs, or on the CPU, can do."""
    return Abilities(
        kind=RunKind.golden,
        eager=True,
        references=True,
        memory_known=True,
        gpu_compiler="triton" if settings.compile else "",
        ranks=_ranks,
        share=_share,
    )


def _share(config: Config) -> DeviceShare | None:
    """Return the one GPU of a run that asks for one; any other device_map spreads over all."""
    if config.device_map.strategy not in ("cuda:0", "stream") or config.tp_degree > 1:
        return None
    devices = nvidia.visible_gpus()
    return DeviceShare(nvidia.VISIBLE, devices, 1) if devices else None


def _ranks(config: Config) -> RankDevices:
    """Return the GPUs, joined by NCCL, or the CPU, joined by gloo, where there is none."""
    cards = len(nvidia.gpu_names()) if config.device_map.strategy != "cpu" else 0
    if cards:
        return RankDevices("cuda", "nccl", "cuda", cards)
    return RankDevices("cpu", "gloo", "cpu")


def build(settings: Settings, config: Config) -> Backend:
    """Return the backend of a configuration, not yet opened; transformers is not yet imported.

    Raises UserError for a ``device_map`` or ``max_memory`` that cannot be read.
    """
    from layerparity.backends.gpu.backend import from_config

    keep_torch_xla_out()
    return from_config(config, settings.compile)
