"""Build a scope of an architecture on the meta device, and weigh every stage of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Site
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.machine.device import keep_torch_xla_out
from layerparity.making.needs import ITEMSIZE
from layerparity.model.weight_types import patterns_of, stays_float32

if TYPE_CHECKING:
    from layerparity.anatomy.family import Family
    from layerparity.model.skeleton import Skeleton

# Building the architecture is what a plan spends its time on, and it needs no precision for that.
_BUILT_IN = "bfloat16"


@dataclass(frozen=True)
class StageWeight:
    """One tensor of a stage that a checkpoint fills.

    ``name`` begins with the stage's. ``itemsize`` is its own where the run's dtype does not change
    it (whole numbers, and what the architecture makes in a type of its own), else None;
    ``float32_in`` are the dtypes of runs that keep it in float32. ``parameter`` is False for a
    stored buffer. ``tied``: the model has it once, as an earlier stage's; a run holds it twice.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    parameter: bool
    itemsize: int | None = None
    float32_in: frozenset[str] = frozenset()
    tied: bool = False

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
    weights, held = {}, set[int]()
    for stage in stages:
        module = skeleton.module(stage)
        own = partial(skeleton.weight, stage)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        weights[stage] = tuple(
            StageWeight(
                f"{stage}.{name}",
                tuple(tensor.shape),
                tensor.numel(),
                name in parameters,
                None if tensor.dtype == skeleton.dtype else tensor.itemsize,
                frozenset(e for e in ITEMSIZE if stays_float32(own(name), patterns[e])),
                id(tensor) in held,
            )
            for name, tensor in module.state_dict(keep_vars=True).items()
        )
        held.update(map(id, module.parameters()))
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
        """The number of parameters, a tied head's once; stored buffers are not counted."""
        return sum(w.numel for w in self._all() if w.parameter and not w.tied)

    def bytes(self, dtype: str) -> WeightBytes:
        """Return the bytes of all its tensors in ``dtype``, of a tied head's once."""
        return bytes_of((each for each in self._all() if not each.tied), dtype)

    def twice(self, dtype: str) -> int:
        """Return the bytes that a run of ``dtype`` holds a second time, as of a tied head."""
        return bytes_of((each for each in self._all() if each.tied), dtype).all

    def _all(self) -> Iterator[StageWeight]:
        return (weight for each in self.weights.values() for weight in each)


def build(
    values: Mapping[str, Any],
    family: Family,
    stages: Sequence[str],
    attention: str | None,
    experts: str | None,
    *,
    chained: bool = True,
) -> PlannedModel:
    """Return the model of config.json's values on the meta device, without a weight.

    ``attention`` and ``experts`` are the implementations asked for; None: transformers' own choice.
    ``chained`` says whether each stage is fed the one before it. Raises UserError for an
    architecture that is unknown, that has no such stages, or whose stages would not be the model:
    what fits and cannot be run is of no use.
    """
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton
    from layerparity.ports.observed.proof import check, prove

    keep_torch_xla_out()
    skeleton = Skeleton(
        read_config(values),
        getattr(torch, _BUILT_IN),
        attention or family.attention,
        experts if experts != "static" else None,
        family.float32_patterns,
    )
    check(prove(skeleton, family), skeleton.config.model_type, stages, chained)
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
