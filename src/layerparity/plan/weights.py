"""Weigh every stage of an architecture on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Site
from layerparity.model.weight_types import patterns_of, stays_float32

if TYPE_CHECKING:
    from layerparity.model.skeleton import Skeleton

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StageWeight:
    """One tensor of a stage that a checkpoint fills.

    ``name`` begins with the stage's. ``itemsize`` is its own where the run's dtype does not change
    it (whole numbers, and what the architecture makes in a type of its own), else None;
    ``float32_in`` are the dtypes of runs that keep it in float32. ``parameter`` is False for a
    stored buffer.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    parameter: bool
    itemsize: int | None = None
    float32_in: frozenset[str] = frozenset()

    def bytes(self, dtype: str) -> int:
        """Return its bytes in a run of ``dtype``, by the rule of `Skeleton.held_dtype`."""
        held = ITEMSIZE["float32"] if dtype in self.float32_in else self.itemsize
        return self.numel * (held or ITEMSIZE[dtype])


def stage_weights(
    skeleton: Skeleton, stages: Sequence[str], family: Sequence[str]
) -> dict[str, tuple[StageWeight, ...]]:
    """Return every stage's tensors. A tied head has one of its own, as it has in a run.

    ``family`` are the family's patterns of what stays float32; transformers' class has its own,
    which differ by the run's dtype. Raises UserError for a stage that the architecture lacks.
    """
    import torch

    patterns = {
        each: patterns_of(skeleton.model, getattr(torch, each), family) for each in ITEMSIZE
    }
    weights = {}
    for stage in stages:
        module, path = skeleton.module(stage), skeleton.path(stage)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        weights[stage] = tuple(
            StageWeight(
                f"{stage}.{name}",
                tuple(tensor.shape),
                tensor.numel(),
                name in parameters,
                None if tensor.dtype == skeleton.dtype else tensor.itemsize,
                frozenset(e for e in ITEMSIZE if stays_float32(f"{path}.{name}", patterns[e])),
            )
            for name, tensor in module.state_dict().items()
        )
    return weights


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of parameters and of stored buffers."""

    parameters: int = 0
    buffers: int = 0

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(self.parameters + other.parameters, self.buffers + other.buffers)

    @property
    def all(self) -> int:
        """Both together."""
        return self.parameters + self.buffers


def bytes_of(weights: Iterable[StageWeight], dtype: str, degree: int = 1) -> WeightBytes:
    """Return what one of ``degree`` devices holds of some tensors in a run of ``dtype``.

    Tensor parallelism splits what has two dimensions or more, and gives everyone the rest.
    """
    total = WeightBytes()
    for weight in weights:
        shard = -(-weight.bytes(dtype) // (degree if len(weight.shape) > 1 else 1))
        total += WeightBytes(shard, 0) if weight.parameter else WeightBytes(0, shard)
    return total


def ranges(stages: Sequence[str]) -> str:
    """Return stages with consecutive blocks joined: ``embed_tokens, layers.0..7``."""
    parts: list[tuple[str, int | None, int | None, str]] = []
    for stage in stages:
        site = Site(stage, "in")
        if site.layer is None:
            parts.append((stage, None, None, ""))
            continue
        _, _, last, component = parts[-1] if parts else ("", None, None, "")
        if last is not None and last + 1 == site.layer and component == site.component:
            parts[-1] = (parts[-1][0], parts[-1][1], site.layer, component)
        else:
            parts.append(("layers", site.layer, site.layer, site.component))
    texts = []
    for name, first, last, component in parts:
        span = "" if first is None else f".{first}" if first == last else f".{first}..{last}"
        texts.append(f"{name}{span}.{component}" if component else f"{name}{span}")
    return ", ".join(texts)
