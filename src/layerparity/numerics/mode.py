"""Mode: every torch operation inside goes through one method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

Operation = Callable[..., Any]


class Mode(TorchFunctionMode):
    """A context in which ``run(func, args, named)`` answers each operation."""

    def __torch_function__(
        self,
        func: Operation,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Hand an operation to ``run``."""
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func: Operation, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return an operation's result; as it is, unless a mode knows better."""
        return func(*args, **named)
