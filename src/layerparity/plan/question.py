"""Question: one model, one set of devices, one way to run; and what each stage then needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.machine.device import keep_torch_xla_out
from layerparity.plan.devices import Devices
from layerparity.plan.needs import PassSize, cache_bytes, stage_activations
from layerparity.plan.weights import ITEMSIZE, Size, Weight, size_of, stage_weights

if TYPE_CHECKING:
    from layerparity.anatomy.family import Family
    from layerparity.model.skeleton import Skeleton


STREAM = "stream"


@dataclass(frozen=True)
class Question:
    """Would it fit? ``new_tokens`` are generated after ``tokens``; every one is cached.

    With ``neuron`` all stages are on one device, or split over ``degree`` of them.
    """

    model: Model
    devices: Devices
    strategy: str
    max_memory: str | None
    dtype: str
    batch: int
    tokens: int
    new_tokens: int = 0
    neuron: bool = False
    degree: int = 1

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """Each stage's weights on a device that holds it."""
        held = self.model.weights
        return {stage: size_of(held[stage], self.dtype, self.degree) for stage in held}

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of each stage's weights, parameters and buffers together."""
        return {stage: size.all for stage, size in self.sizes.items()}

    @cached_property
    def cache(self) -> dict[str, int]:
        """Bytes of each stage's keys and values."""
        tokens, item = self.tokens + self.new_tokens, ITEMSIZE[self.dtype]
        sizes, batch = self.model.sizes, self.batch
        return {
            stage: cache_bytes(
                sizes, stage, batch=batch, tokens=tokens, itemsize=item, degree=self.degree
            )
            for stage in self.model.stages
        }

    @cached_property
    def activations(self) -> dict[str, int]:
        """Bytes of each stage's activations, an estimate."""
        model = self.model
        made = PassSize(
            self.batch, self.tokens, ITEMSIZE[self.dtype], model.attention, model.experts
        )
        return {
            stage: stage_activations(model.sizes, stage, stage in model.sparse, made)
            for stage in model.stages
        }


# Building the architecture is what a plan spends its time on, and it needs no precision for that.
_BUILT_IN = "bfloat16"


@dataclass(frozen=True)
class Model:
    """A scope of an architecture: its stages' tensors in running order, and its sizes.

    ``sparse`` are the stages that hold experts, ``blocks`` those that are never split;
    ``attention`` and ``experts`` name the implementations that compute.
    """

    weights: Mapping[str, tuple[Weight, ...]]
    sizes: ModelSizes
    sparse: frozenset[str]
    blocks: frozenset[str]
    attention: str
    experts: str

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in running order."""
        return tuple(self.weights)

    @property
    def parameters(self) -> int:
        """The number of parameters; stored buffers are not counted."""
        return sum(w.numel for each in self.weights.values() for w in each if w.parameter)

    def size(self, dtype: str) -> Size:
        """Return the bytes of all its tensors in a run of ``dtype``."""
        return size_of((weight for each in self.weights.values() for weight in each), dtype)


def build(
    values: Mapping[str, Any],
    family: Family,
    stages: Sequence[str],
    attention: str | None,
    experts: str | None,
) -> Model:
    """Return the model of config.json's values on the meta device, without a weight.

    ``attention`` and ``experts`` are the implementations asked for; None: transformers' own choice.
    Raises UserError for an architecture that is unknown, or that has no such stages.
    """
    skeleton = _skeleton(values, family, attention, experts)
    weights = stage_weights(skeleton, stages, family.float32_patterns)
    whole = set(getattr(skeleton.model, "_no_split_modules", None) or ())
    kinds = {stage: type(skeleton.module(stage)).__name__ for stage in stages}
    config: Any = skeleton.model.config
    return Model(
        weights,
        sizes_of(config),
        frozenset(s for s in stages if any(".experts" in w.name for w in weights[s])),
        frozenset(stage for stage, kind in kinds.items() if kind in whole),
        config._attn_implementation,
        experts or str(getattr(config, "_experts_implementation", None)),
    )


def _skeleton(
    values: Mapping[str, Any], family: Family, attention: str | None, experts: str | None
) -> Skeleton:
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    keep_torch_xla_out()
    return Skeleton(
        read_config(values),
        getattr(torch, _BUILT_IN),
        attention or family.attention or "sdpa",
        experts if experts != "static" else None,
        family.float32_patterns,
    )
