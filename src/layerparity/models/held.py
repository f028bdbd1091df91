"""Held: which weights a run of some dtype keeps in float32, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
