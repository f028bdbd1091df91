"""Find the packed weights among a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, PackedWeight
from layerparity.model.packing_format import Format, Quantization, UnfitError

KNOWN = "model.packings"
# What stands for the scale of activations or of a cache, and never of a weight.
_OF_ACTIVATIONS = (
    *("input_scale", "activation_scale", "output_scale", "input_global_scale", "input_zero_point"),
    *("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_zero_point"),
)
# What changes a product, and is in no weight's values.
_OF_INPUTS = ("pre_quant_scale",)
# What is of no use by itself.
_LONELY = (
    *("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "qzeros"),
    *("weight_zero_point", "weight_g_idx", "weight_shape"),
)
_MISSING = "scale_missing"
QUANTIZATION = "quantization_config"
# What ModelOpt writes beside config.json, in place of that key or as well; and its name there.
MODELOPT, _MODELOPT = "hf_quant_config.json", "modelopt"


class PackingFault(NamedTuple):
    """What is wrong with a packed weight: the audit's word for it, the sentence, the tensor."""

    what: str
    text: str
    tensor: Stored


@dataclass
class Unpacked:
    """A checkpoint's tensors with each packed weight in place of its parts.

    ``faults`` are by weight or lonely part;
    ``unused`` are scales of activations and the like, which no weight's values depend on;
    ``unjudged`` are weights whose other parts are lost.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    packed: dict[str, PackedWeight] = field(default_factory=dict)
    faults: dict[str, PackingFault] = field(default_factory=dict)
    unused: list[Stored] = field(default_factory=list)
    unjudged: set[str] = field(default_factory=set)

    @property
    def kinds(self) -> set[str]:
        """The formats of its packed weights."""
        return {each.dtype for each in self.packed.values()}

    def refuse(self, name: str) -> None:
        """Raise UserError where something is wrong with a tensor."""
        if name in self.faults:
            fault = self.faults[name]
            noise = "without its scales it is noise; " if fault.what == _MISSING else ""
            raise UserError(fault.text, f"{noise}fetch the checkpoint again.")


@cache
def formats() -> tuple[Format, ...]:
    """Return every format that is known."""
    return tuple(registry.load(KNOWN, name).FORMAT for name in registry.names(KNOWN))


def of_modelopt(said: Mapping[str, object]) -> dict[str, object]:
    """Return as config.json would have it what ModelOpt's file says of the quantization."""
    inside = said.get("quantization")
    return {"quant_method": _MODELOPT, **(inside if isinstance(inside, Mapping) else said)}


def settings_of(config: Mapping[str, object]) -> Quantization:
    """Return what config.json's values say of the quantization.

    Raises UserError for one that is not read.
    """
    said = config.get(QUANTIZATION)
    if said is None:
        return Quantization("", {})
    keys = said if isinstance(said, Mapping) else {}
    method = str(keys.get("quant_method", "")) or _unnamed(keys)
    known = {method for each in formats() for method in each.methods if method}
    if method not in known:
        by = method or "what it does not name"
        raise UserError(
            f"config.json says that the weights are quantised by {by}, which is not read: "
            f"{', '.join(sorted(known))} are",
            "give the checkpoint that it was quantised from.",
        )
    if keys.get("transform_config"):
        raise UserError(
            "config.json says that weights were rotated before they were quantised "
            "(transform_config), which is not read",
            "give the checkpoint that it was quantised from.",
        )
    return Quantization(method, keys)


def _unnamed(keys: Mapping[str, object]) -> str:
    """Return who quantised weights, where config.json says it by other keys than the usual one."""
    producer = keys.get("producer")
    if isinstance(producer, Mapping) and producer.get("name"):
        return str(producer["name"])
    return "MLX" if {"bits", "group_size"} <= keys.keys() else ""


def unpack(
    config: Mapping[str, object], tensors: Mapping[str, Stored], lost: Collection[str] = ()
) -> Unpacked:
    """Return a checkpoint's tensors, by name, with the packed ones put together.

    Nothing is said of parts whose names are in ``lost``. Raises UserError for a quantization
    that is not read.
    """
    settings, found = settings_of(config), Unpacked(dict(tensors))
    lacking: dict[str, str] = {}
    for stored in tensors.values():
        lacking |= _put_together(found, stored, settings, tensors, lost)
    for weight, lacks in lacking.items():
        numbers = found.tensors.get(weight)
        # What another format takes for a scale, or needs less for, lacks nothing.
        if numbers is not None and numbers.dtype.startswith("F8") and weight not in found.packed:
            text = f"{weight} is stored as {numbers.dtype} without {lacks}"
            found.faults.setdefault(weight, PackingFault(_MISSING, text, numbers))
    for name in list(found.tensors):
        last = name.rpartition(".")[2]
        # Of experts in one stack, the scale is named after the stack.
        if settings.method and (last in _OF_ACTIVATIONS or last.endswith("_activation_scale")):
            found.unused.append(found.tensors.pop(name))
        elif last in _OF_INPUTS:
            weight = name.removesuffix(last) + "weight"
            text = f"{name} scales what the weight is multiplied by, which is not read"
            found.faults[weight] = PackingFault("scale_unread", text, found.tensors[name])
        elif last in _LONELY:
            _note_lonely(found, name, last, lost)
    return found


def _put_together(
    found: Unpacked,
    stored: Stored,
    settings: Quantization,
    tensors: Mapping[str, Stored],
    lost: Collection[str],
) -> dict[str, str]:
    """Put a weight together where a tensor is its numbers; return what it lacks, by its name."""
    for each in formats():
        weight = each.weight_of(stored, settings)
        if weight is None:
            continue
        parts = each.parts_of(weight, tensors)
        lacks = [each.names(weight, role)[0] for role in each.needed if role not in parts]
        if not lacks:
            _take(found, each, weight, parts, settings)
            return {}
        if any(name in lost for name in lacks):
            found.unjudged.add(weight)
            return {}
        if weight == stored.name:
            return {weight: lacks[0]}
    return {}


def _note_lonely(found: Unpacked, name: str, last: str, lost: Collection[str]) -> None:
    """Note that a scale belongs to no weight, unless more is wrong with that one."""
    owner = name.removesuffix(last) + "weight"
    stored = found.tensors.get(owner)
    if owner in found.faults or (stored is None and _is_lost(owner, lost)):
        return
    what = f"{owner} is {stored.dtype}" if stored is not None else f"no {owner}"
    text = f"{name} is there, and {what}"
    fault = PackingFault("scale_orphan", text, found.tensors[name])
    found.faults.setdefault(name, fault)


def is_scale(name: str) -> bool:
    """Say whether a stored name is that of a part that stands beside a weight's numbers."""
    last = name.rpartition(".")[2]
    return last in _LONELY or last.endswith(("_scale_inv", "proj_scale"))


def weights_of(names: Collection[str]) -> set[str]:
    """Return the weights that stored names may be the numbers of, and the names themselves."""
    suffixes = {(s, each.stem) for each in formats() for s in each.suffixes if s}
    return {*names} | {
        name.removesuffix(suffix) + stem
        for name in names
        for suffix, stem in suffixes
        if name.endswith(suffix)
    }


def _take(
    found: Unpacked, each: Format, weight: str, parts: Mapping[str, Stored], settings: Quantization
) -> None:
    """Put a weight in place of its parts."""
    numbers = parts[NUMBERS]
    try:
        kind, shape, layout = each.lay(parts, settings)
    except UnfitError as error:
        found.faults[weight] = PackingFault(error.what, error.text, error.part)
        return
    found.faults.pop(weight, None)
    for part in parts.values():
        found.tensors.pop(part.name, None)
    for suffix in each.unused:
        name = weight.removesuffix(each.stem) + suffix
        if name in found.tensors:
            found.unused.append(found.tensors.pop(name))
    size = sum(part.bytes for part in parts.values())
    packed = PackedWeight(
        *(weight, numbers.file, kind, shape, size, numbers.begin), parts=parts, layout=layout
    )
    found.tensors[weight] = found.packed[weight] = packed


def _is_lost(weight: str, lost: Collection[str]) -> bool:
    """Say whether a weight's numbers, by any format's name, are among the names that are lost."""
    return any(name in lost for each in formats() for name in each.names(weight))
