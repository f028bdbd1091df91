"""What cache the layers of a model want."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class LayerSpec:
    """The cache of one layer, on each rank."""

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window_size: int | None = None
    chunk_size: int | None = None


@dataclass
class KVSpec:
    """Those of all layers."""

    layers: list[LayerSpec]
