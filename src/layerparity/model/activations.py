"""What engines round the inputs of packed weights to, as a checkpoint says it.

An engine with kernels of few bits packs what it multiplies, too. config.json says how for groups of
modules, or a scale that was measured beforehand stands beside the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from layerparity.model.packing import settings_of
from layerparity.numbers.activations import LARGEST, Activations

if TYPE_CHECKING:
    from torch import nn

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.packed import PackedWeight
    from layerparity.model.packing_format import Quantization
    from layerparity.model.skeleton import Skeleton

# What stands beside a weight `x.weight`, or is named after it; the last is divided by.
_SCALES = ("input_scale", "activation_scale", "input_global_scale")
_DIVIDED = "input_global_scale"
# By the format of weights, and by what config.json says: the type.
_KINDS = {"F8_E4M3": "FP8", "INT8": "INT8", "INT4": "INT4", "NVFP4": "FP4", "MXFP4": "FP4"}
_TYPES: dict[object, str] = {
    **{("float", 8): "FP8", ("float", 4): "FP4"},
    **{("int", 8): "INT8", ("int", 4): "INT4"},
}
_QUARK = {
    **{"fp8_e4m3": ("float", 8), "fp4": ("float", 4)},
    **{"int8": ("int", 8), "int4": ("int", 4)},
}
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
    return _said(weight, settings_of(checkpoint.config), scale)


def of_any(checkpoint: Checkpoint) -> Activations | None:
    """Return how the inputs of the first weight are rounded that says it; None where none does."""
    every = (of_weight(checkpoint, name) for name in checkpoint.unpacked.packed)
    return next((each for each in every if each), None)


def _scale(checkpoint: Checkpoint, weight: PackedWeight) -> float:
    """Return the scale that is stored for a weight's inputs, 0 where there is none that counts."""
    base = _module(weight)
    for suffix in _SCALES:
        for name in (f"{base}.{suffix}", f"{base}_{suffix}"):
            if name in checkpoint.stored:
                held = checkpoint.value(name).float()
                # An expert that no token reached while they were measured has none.
                held = held[held.isfinite() & (held > 0)]
                if held.numel():
                    # Of a stack each matrix has one, of which engines take the largest.
                    return 1 / float(held.min()) if suffix == _DIVIDED else float(held.max())
    return 0.0


def _module(weight: PackedWeight) -> str:
    return weight.name.removesuffix("weight").removesuffix(".")


def _said(weight: PackedWeight, settings: Quantization, scale: float) -> Activations | None:
    """Return what the quantization's keys, and the ``scale``, say of a weight's inputs."""
    keys, kind, method = settings.keys, _KINDS[weight.dtype], settings.method
    if method in ("compressed-tensors", "quark"):
        read = _of_quark if method == "quark" else _of_groups
        return _of_spec(read(keys, _module(weight), kind), scale)
    if method == "fp8" and kind == "FP8":
        if keys.get("activation_scheme") == "static":
            return Activations(kind, fixed=scale) if scale else Activations(kind, whole=True)
        block = keys.get("weight_block_size")
        group = block[1] if isinstance(block, list | tuple) and len(block) == 2 else 0
        return Activations(kind, group, powers=keys.get("scale_fmt") == "ue8m0")
    by_token = method == "modelopt" and "PER_TOKEN" in str(keys.get("quant_algo"))
    if kind == "FP8" and (method == "fbgemm_fp8" or (by_token and not scale)):
        return Activations(kind)
    if method == "modelopt" and scale and kind in ("FP8", "FP4"):
        return Activations(kind, 16 if kind == "FP4" else 0, fixed=scale)
    return None


def _of_groups(keys: Mapping[str, object], module: str, kind: str) -> Mapping[str, object]:
    """Return what compressed-tensors' groups say of a module's inputs; nothing where they differ.

    One that names the module counts before one that names its class.
    """
    named: list[Mapping[str, object]] = []
    others: list[Mapping[str, object]] = []
    for group in _mapping(keys, "config_groups").values():
        weights, targets = _mapping(group, "weights"), _listed(group, "targets")
        if _type(weights) == kind:
            is_named = any(_names(str(target), module) for target in targets)
            (named if is_named else others).append(_mapping(group, "input_activations"))
    found = named or others
    return found[0] if found and all(each == found[0] for each in found) else {}


def _type(said: Mapping[str, object]) -> str:
    """Return the type that compressed-tensors' keys name, or nothing."""
    bits = said.get("num_bits")
    named = (str(said.get("type", "int")), bits) if isinstance(bits, int) else None
    return _TYPES.get(named, "")


def _names(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False


def _of_quark(keys: Mapping[str, object], module: str, kind: str) -> Mapping[str, object]:
    """Return what Quark says of a module's inputs, in compressed-tensors' words."""
    layers = _mapping(keys, "layer_quant_config")
    own = next((pattern for pattern in layers if fnmatchcase(module, pattern)), None)
    said = _mapping(keys, "global_quant_config") if own is None else _mapping(layers, own)
    weights, inputs = _mapping(said, "weight"), _mapping(said, "input_tensors")
    named = _QUARK.get(str(inputs.get("dtype")))
    if named is None or _TYPES.get(_QUARK.get(str(weights.get("dtype")))) != kind:
        return {}
    return {
        **{"type": named[0], "num_bits": named[1], "symmetric": inputs.get("symmetric")},
        **{"group_size": inputs.get("group_size"), "dynamic": inputs.get("is_dynamic")},
        "strategy": _STRATEGIES.get(str(inputs.get("qscheme"))),
        "scale_dtype": inputs.get("scale_format"),
    }


def _of_spec(said: Mapping[str, object], scale: float) -> Activations | None:
    """Return what compressed-tensors' ``input_activations`` mean, where they are read."""
    kind = _type(said)
    size, strategy = said.get("group_size"), said.get("strategy")
    group = size if isinstance(size, int) and strategy in ("group", "tensor_group") else 0
    if kind not in LARGEST or said.get("symmetric") is False:
        return None
    if said.get("dynamic") is not True and not scale:
        return None
    measured = said.get("dynamic") is not True or strategy == "tensor_group"
    return Activations(
        kind,
        group,
        whole=strategy == "tensor" and not measured,
        fixed=scale if measured else 0.0,
        powers="e8m0" in str(said.get("scale_dtype")) or said.get("scale_dtype") == "torch.uint8",
    )


def _mapping(owner: object, key: str) -> Mapping[str, object]:
    held = owner.get(key) if isinstance(owner, Mapping) else None
    return held if isinstance(held, Mapping) else {}


def _listed(owner: object, key: str) -> Sequence[object]:
    held = owner.get(key) if isinstance(owner, Mapping) else None
    return held if isinstance(held, list | tuple) else ()
