"""The gpu backend: transformers and accelerate, on the GPUs here, or on the CPU without one.

Nothing heavy is imported until `build`; the rooms behind it are in ``_gpu``.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.backends.base import Affinity

if TYPE_CHECKING:
    from layerparity.backends._gpu.backend import GpuBackend
    from layerparity.config import Config


@dataclass
class Settings:
    """conf/backend/gpu: ``compile`` runs each stage through torch.compile instead of eagerly."""

    name: str = "gpu"
    compile: bool = False


def affinity() -> Affinity:
    """Return how well this backend fits; torch is imported only where there is a GPU driver."""
    if "torch" in sys.modules or _has_driver():
        import torch

        count = torch.cuda.device_count()
        if count:
            name = torch.cuda.get_device_name(0)
            return Affinity(2, "cuda", f"{count} GPU{'s' if count > 1 else ''}: {name}")
    return Affinity(1, "cpu", "no GPU here: device_map=cpu runs on the CPU")


def build(settings: Settings, config: Config) -> GpuBackend:
    """Return the backend of a configuration, not yet opened; transformers is not yet imported.

    Raises UserError for a ``device_map`` or ``max_memory`` that cannot be read.
    """
    # This keeps torch_xla out of accelerate, so it comes before transformers and accelerate.
    from layerparity.backends._gpu.backend import from_config

    return from_config(settings, config)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True
