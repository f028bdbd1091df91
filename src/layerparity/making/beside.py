"""Compute a stage's components on an input of another run as well, in the call of the stage.

What a component is computed from is not what the other run had there. Its weights are read, widened
or sorted once for both: that is most of what they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.family import Tap
from layerparity.anatomy.site import within
from layerparity.ports.observed.observe import first_tensor, picked


class Beside:
    """Inputs of some components of a stage, and what came of them.

    Each component is called with two batches, the stage's own and the other: it must take one
    tensor and treat tokens apart. Of one that is called in another way ``outputs`` lacks the path.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        """``given`` is floating [batch, token, channel], by the component's path in the stage."""
        self._given = dict(given)
        # What each component gave out of its other input, and taps saw of that.
        self._others: dict[str, Any] = {}
        self.seen: dict[str, torch.Tensor] = {}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """First outputs, floating [batch, token, channel], by the component's path."""
        return {path: first_tensor(other) for path, other in self._others.items()}

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Call the components of a stage's module with both inputs."""
        with ExitStack() as stack:
            for path in self._given:
                for handle in self._hooks(path, module.get_submodule(path)):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, path: str, component: nn.Module) -> Iterable[Any]:
        called: list[bool] = []

        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            given = self._given[path]
            value = args[0] if len(args) == 1 and not named else None
            if called:
                # What its taps show is of the last call.
                self._others.pop(path, None)
                return None
            if not isinstance(value, torch.Tensor) or value.shape != given.shape:
                return None
            called.append(True)
            return (torch.cat([value, given.to(value.device, value.dtype)]),), named

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if len(called) != 1:
                return None
            called.append(False)
            own, self._others[path] = _halves(output)
            return own

        yield component.register_forward_pre_hook(before, with_kwargs=True)
        yield component.register_forward_hook(after)

    def take_out(self, taps: Iterable[tuple[str, Tap]], seen: dict[str, torch.Tensor]) -> None:
        """Move what taps saw of the other inputs out of ``seen``, any shape by site.

        ``taps`` are those of the stage, each with its module's path in it. What a component gives
        out was taken apart before its tap saw it.
        """
        for path, tap in taps:
            owner = next((each for each in self._others if within(path, each)), None)
            if owner is None or tap.local not in seen:
                continue
            if path == owner and not tap.of_input:
                value = picked(tap, self._others[owner])
                if value is not None:
                    self.seen[tap.local] = value
            else:
                seen[tap.local], self.seen[tap.local] = seen[tap.local].chunk(2)


def _halves(value: Any) -> tuple[Any, Any]:
    """Return the two batches of a module's output, one tensor or a tuple with some."""
    if isinstance(value, torch.Tensor):
        own, other = value.chunk(2)
        return own, other
    if isinstance(value, tuple):
        each = [_halves(part) for part in value]
        return tuple(own for own, _ in each), tuple(other for _, other in each)
    return value, value
