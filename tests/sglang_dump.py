"""Writes SGLang's dump of tests/serving_engine.py, as SGLang's own hooks would.

After python/sglang/srt/debug_utils/tensor_dump_forward_hook.py of sgl-project/sglang: modules
without modules in them, and ``model``, are hooked; a pass is written when ``model`` ends, before
its own output is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serving_engine import Batch, Engine, share
from torch import nn


class SglangDump:
    """Hooks an engine; a folder is written for each of so many ranks."""

    def __init__(self, engine: Engine, folder: Path, ranks: int = 1, *, info: bool = True) -> None:
        self.folder, self.ranks, self.passes = folder, ranks, 0
        # Whether the engine keeps seq_lens, as SGLang does and vLLM does not.
        self.info = info
        self.held: dict[str, Any] = {}
        self._hook(engine, "")

    def _hook(self, module: nn.Module, prefix: str) -> None:
        for name, child in module._modules.items():
            full = f"{prefix}.{name}" if prefix else name
            assert child is not None
            self._hook(child, full)
            if not child._modules or full == "model":
                child.register_forward_hook(self._keep(full))

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            if name == "model":
                batch = next(each for each in given if isinstance(each, Batch))
                for key, value in batch._asdict().items():
                    if self.info or key != "seq_lens":
                        self.held[f"model.forward_batch_info.{key}"] = value.clone()
                self._write()
            several = [out] if isinstance(out, torch.Tensor) else list(out)
            tensors = [each.clone() for each in several if each is not None]
            self.held[name] = tensors[0] if len(tensors) == 1 else tensors

        return keep

    def _write(self) -> None:
        for rank in range(self.ranks):
            own = {
                name: share(name, value, rank, self.ranks)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in self.held.items()
            }
            where = self.folder / f"TP{rank}_PP0_Rank{rank}_pid{4000 + rank}"
            where.mkdir(parents=True, exist_ok=True)
            torch.save(
                {
                    k: [e.clone() for e in v] if isinstance(v, list) else v.clone()
                    for k, v in own.items()
                },
                where / f"Pass{self.passes:05d}.pt",
            )
        self.held, self.passes = {}, self.passes + 1
