"""Widen: whatever is computed inside is computed in a wider floating type.

The weights stay as they are stored: each is widened where an operation meets it, so no second copy
of a stage is ever held. Casts that a model's code makes by name (a norm's ``.to(float32)``, a
softmax's ``dtype=float32``) are widened too: a reference one precision wider has none left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layerparity.numerics.mode import Mode, Operation

_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double)


class Widen(Mode):
    """Compute in ``dtype``: operations that meet a tensor of it take their others in it as well."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def run(self, func: Operation, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run one operation, its floating dtypes and narrower operands made wide."""
        if func in _CASTS:
            return args[0].to(self.dtype)
        args = [self._dtypes(each) for each in args]
        named = {key: self._dtypes(value) for key, value in named.items()}
        if self._meets(args) or self._meets(named.values()):
            args = [self._wide(each) for each in args]
            named = {key: self._wide(value) for key, value in named.items()}
        return func(*args, **named)

    def _dtypes(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return self.dtype
        return value

    def _meets(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.dtype == self.dtype:
                    return True
            elif isinstance(value, (list, tuple)) and self._meets(value):
                return True
        return False

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            narrow = value.is_floating_point() and value.dtype != self.dtype
            return value.to(self.dtype) if narrow else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._wide(each) for each in value)
        return value
