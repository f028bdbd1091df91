"""Build a scope of an architecture on the meta device, for what its tensors weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.machine.device import keep_torch_xla_out
from layerparity.plan.weights import StageWeight, WeightBytes, bytes_of, stage_weights

if TYPE_CHECKING:
    from layerparity.anatomy.family import Family

# Building the architecture is what a plan spends its time on, and it needs no precision for that.
_BUILT_IN = "bfloat16"


@dataclass(frozen=True)
class PlannedModel:
    """A scope of an architecture: its stages' tensors in running order, and its sizes.

    ``sparse`` are the stages that hold experts, ``blocks`` those that are never split;
    ``attention`` and ``experts`` name the implementations that compute.
    """

    weights: Mapping[str, tuple[StageWeight, ...]]
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

    def bytes(self, dtype: str) -> WeightBytes:
        """Return the bytes of all its tensors in a run of ``dtype``."""
        return bytes_of((weight for each in self.weights.values() for weight in each), dtype)


def build(
    values: Mapping[str, Any],
    family: Family,
    stages: Sequence[str],
    attention: str | None,
    experts: str | None,
) -> PlannedModel:
    """Return the model of config.json's values on the meta device, without a weight.

    ``attention`` and ``experts`` are the implementations asked for; None: transformers' own choice.
    Raises UserError for an architecture that is unknown, or that has no such stages.
    """
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    keep_torch_xla_out()
    skeleton = Skeleton(
        read_config(values),
        getattr(torch, _BUILT_IN),
        attention or family.attention or "sdpa",
        experts if experts != "static" else None,
        family.float32_patterns,
    )
    weights = stage_weights(skeleton, stages, family.float32_patterns)
    whole = set(getattr(skeleton.model, "_no_split_modules", None) or ())
    kinds = {stage: type(skeleton.module(stage)).__name__ for stage in stages}
    config: Any = skeleton.model.config
    return PlannedModel(
        weights,
        sizes_of(config),
        frozenset(s for s in stages if any(".experts" in w.name for w in weights[s])),
        frozenset(stage for stage, kind in kinds.items() if kind in whole),
        config._attn_implementation,
        experts or str(getattr(config, "_experts_implementation", None)),
    )
