"""Nested: tensors inside tuples, lists and dicts, as a stage is given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with every tensor in it changed; what is no container stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def is_plain(value: Any) -> bool:
    """Say whether a value is made of tensors, numbers, text and containers of them only."""
    if isinstance(value, dict):
        return all(is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return value is None or isinstance(value, torch.Tensor | int | float | str)
