"""What an engine's products round their operands to, as its modules say it.

This needs torch alone, as all that runs in an engine's process.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# What vLLM calls the types of a cache, and what operands= does.
_CACHES = dict.fromkeys(("fp8", "fp8_e4m3"), "cache_float8_e4m3") | {
    "fp8_e5m2": "cache_float8_e5m2"
}
# Classes of vLLM's, and of transformers', that quantise what weights are multiplied by; and those
# of vLLM's kernels that do not.
_PACKING = re.compile(r"W[48]A[48]|Fp8(Linear|MoE)Method$|FP8(Linear|Experts)$")
_AS_IT_IS = re.compile(r"Marlin|MARLIN|W\d+A16|Humming|HUMMING|CPUFp8(Block|PerTensor)")
# What a way of computing keeps its kernel under: an object, a class of experts, or an enum's word.
_KERNELS = ("kernel", "fp8_linear", "fp8_backend", "nvfp4_backend", "mxfp4_backend")


def operands_of(model: nn.Module) -> list[str]:
    """Return what products round to, where vLLM says it: keys and values, and activations."""
    modules = list(model.modules())
    kinds = {str(getattr(each, "kv_cache_dtype", "")) for each in modules} - {""}
    found = [_CACHES[each] for each in kinds if len(kinds) == 1 and each in _CACHES]
    packs = any(
        _packs(way)
        for each in modules
        for way in (each, getattr(each, "scheme", None), getattr(each, "quant_method", None))
    )
    return [*found, *(["activations"] if packs else [])]


def _packs(way: object) -> bool:
    """Say whether what computes a product quantises what weights are multiplied by."""
    if not _PACKING.search(type(way).__name__) or getattr(way, "use_a16", False) is True:
        return False
    experts = getattr(way, "experts_cls", None)
    # A class of experts is what runs, whatever a word beside it says.
    kernels = [experts] if experts is not None else [getattr(way, n, None) for n in _KERNELS]
    names = [each if isinstance(each, Enum | type) else type(each) for each in kernels]
    return not any(_AS_IT_IS.search(str(getattr(each, "__name__", each))) for each in names)
