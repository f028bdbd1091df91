"""What engines round the inputs of packed weights to, as a checkpoint says it.

An engine with kernels of few bits packs what it multiplies, too. config.json says how for groups of
modules, or a scale that was measured beforehand stands beside the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from layerparity.model.packing import settings_of
from layerparity.numbers.activations import Activations

if TYPE_CHECKING:
    from torch import nn

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.packed import PackedWeight
    from layerparity.model.packing_format import Quantization
    from layerparity.model.skeleton import Skeleton

# What stands beside a weight `x.weight`, or is named after it; the last is divided by.
_SCALES = ("input_scale", "activation_scale", "input_global_scale")
_DIVIDED = "input_global_scale"
# By the format of weights: the type of activations that share it.
_KINDS = {"F8_E4M3": "FP8", "INT8": "INT8", "NVFP4": "FP4", "MXFP4": "FP4"}
_TYPES: dict[object, str] = {("float", 8): "FP8", ("int", 8): "INT8", ("float", 4): "FP4"}
_QUARK = {"fp8_e4m3": ("float", 8), "int8": ("int", 8), "fp4": ("float", 4)}
_STRATEGIES = {"per_tensor": "tensor", "per_channel": "token", "per_group": "group"}


def of_stage(
    skeleton: Skeleton, checkpoint: Checkpoint, stage: str, module: nn.Module
) -> dict[int, Activations]:
    """Return how inputs of a stage's weights are rounded, by the `id` of the ``module``'s own.

    Weights that are held as one have the largest of their scales, as engines merge them.
    """
    found = {}
    for name, parameter in module.named_parameters():
        stored = skeleton.made_of(checkpoint, skeleton.weight(stage, name))
        each = [of_weight(checkpoint, source) for source in stored]
        kinds = [one for one in each if one is not None]
        if kinds and len({one._replace(fixed=0.0) for one in kinds}) == 1:
            found[id(parameter)] = max(kinds, key=lambda one: one.fixed)
    return found


def of_weight(checkpoint: Checkpoint, name: str) -> Activations | None:
    """Return how the inputs of a stored weight are rounded; None where they are left as they are.

    So it is where a checkpoint does not say it, or says what is not read.
    """
    weight = checkpoint.unpacked.packed.get(name)
    if weight is None or weight.dtype not in _KINDS:
        return None
    scale = _scale(checkpoint, weight)
    return next(_said(weight, settings_of(checkpoint.config), scale), None)


def of_any(checkpoint: Checkpoint) -> Activations | None:
    """Return how the inputs of the first weight are rounded that says it; None where none does."""
    every = (of_weight(checkpoint, name) for name in checkpoint.unpacked.packed)
    return next((each for each in every if each), None)


def _scale(checkpoint: Checkpoint, weight: PackedWeight) -> float:
    """Return the scale that is stored for a weight's inputs, 0 where there is none."""
    base = weight.name.removesuffix("weight").removesuffix(".")
    for suffix in _SCALES:
        for name in (f"{base}.{suffix}", f"{base}_{suffix}"):
            if name in checkpoint.stored:
                # Of a stack each matrix has one, of which engines take the largest.
                held = checkpoint.value(name).float()
                return 1 / float(held.min()) if suffix == _DIVIDED else float(held.max())
    return 0.0


def _said(weight: PackedWeight, settings: Quantization, scale: float) -> Iterator[Activations]:
    """Yield what the quantization's keys, and the ``scale``, say of a weight's inputs."""
    keys, kind = settings.keys, _KINDS.get(weight.dtype, "")
    if settings.method in ("compressed-tensors", "quark"):
        for said in _groups(settings, kind):
            yield from _of_spec(said, scale)
    elif settings.method == "fp8" and kind == "FP8":
        if keys.get("activation_scheme") == "static":
            yield Activations(kind, fixed=scale) if scale else Activations(kind, whole=True)
            return
        block = keys.get("weight_block_size")
        group = block[1] if isinstance(block, list | tuple) and len(block) == 2 else 0
        yield Activations(kind, group, powers=keys.get("scale_fmt") == "ue8m0")
    elif settings.method == "fbgemm_fp8" and kind == "FP8":
        yield Activations(kind)
    elif settings.method == "modelopt" and scale and kind:
        yield Activations(kind, 16 if kind == "FP4" else 0, fixed=scale)
    elif settings.method == "modelopt" and "PER_TOKEN" in str(keys.get("quant_algo")):
        yield Activations(kind or "FP8")


def _groups(settings: Quantization, kind: str) -> Iterator[Mapping[str, object]]:
    """Yield what is said of inputs beside weights of a ``kind``, in compressed-tensors' words."""
    every = settings.keys.get("config_groups")
    for group in every.values() if isinstance(every, Mapping) else ():
        weights, inputs = (_mapping(group, key) for key in ("weights", "input_activations"))
        if inputs and _TYPES.get((weights.get("type", "int"), weights.get("num_bits"))) == kind:
            yield inputs
    for inputs in (_mapping(settings.keys.get("global_quant_config"), "input_tensors"),):
        named = _QUARK.get(str(inputs.get("dtype")))
        if named:
            strategy = _STRATEGIES.get(str(inputs.get("qscheme")))
            yield {
                **{"type": named[0], "num_bits": named[1], "strategy": strategy},
                **{"group_size": inputs.get("group_size"), "dynamic": inputs.get("is_dynamic")},
                "scale_dtype": "e8m0" if inputs.get("scale_format") == "e8m0" else "",
            }


def _of_spec(said: Mapping[str, object], scale: float) -> Iterator[Activations]:
    """Yield what compressed-tensors' ``input_activations`` mean, where they are read."""
    kind = _TYPES.get((said.get("type", "int"), said.get("num_bits")))
    size, strategy = said.get("group_size"), said.get("strategy")
    group = size if isinstance(size, int) and strategy in ("group", "tensor_group") else 0
    if kind is None or said.get("symmetric") is False:
        return
    if said.get("dynamic") is not True and not scale:
        return
    measured = said.get("dynamic") is not True or strategy == "tensor_group"
    yield Activations(
        kind,
        group,
        whole=strategy == "tensor" and not measured,
        fixed=scale if measured else 0.0,
        powers="e8m0" in str(said.get("scale_dtype")) or said.get("scale_dtype") == "torch.uint8",
    )


def _mapping(owner: object, key: str) -> Mapping[str, object]:
    held = owner.get(key) if isinstance(owner, Mapping) else None
    return held if isinstance(held, Mapping) else {}
