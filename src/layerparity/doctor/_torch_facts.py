"""Torch's own word on CUDA, GPUs, NCCL and threads; called in a process of its own by `_probe`."""

from __future__ import annotations

from typing import Any


def facts() -> dict[str, Any]:
    """Return what torch says of itself; memory in bytes. Imports torch."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "threads": torch.get_num_threads(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
    }


def _gpu(index: int) -> dict[str, Any]:
    import torch

    told = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {"name": told.name, "free": free, "total": total}


def _nccl() -> str:
    """Return NCCL's version, or nothing where torch was built without it."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())
