"""Say in which floating type a checkpoint is held, and what of it stays float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_FLOATING = ("float64", "float32", "bfloat16", "float16")


def own_type(config: Mapping[str, object]) -> str:
    """Return torch's name of the floating type that a checkpoint is of, from config.json's values.

    One that says none was written before there was another than float32, or holds FP8.
    """
    said = str(config.get("dtype") or config.get("torch_dtype"))
    if said in _FLOATING:
        return said
    return "float32" if config.get("quantization_config") is None else "bfloat16"


def patterns_of(
    model: PreTrainedModel, dtype: torch.dtype, family: Iterable[str]
) -> tuple[str, ...]:
    """Return the family's own patterns, and what transformers' class keeps in float32 in a run."""
    return (*family, *(f"*{name}*" for name in model._get_dtype_plan(dtype)))


def stays_float32(name: str, patterns: Iterable[str]) -> bool:
    """Say whether a weight, by its whole name, is one of the patterns.

    The dot before it lets ``*.lm_head.*`` mean a module wherever it stands, the root too.
    """
    return any(fnmatchcase(f".{name}", pattern) for pattern in patterns)
