"""See what weighs the chosen experts where NxDI loads those alone, as it does in decode steps.

There the weights are no method's result: `forward_selective_loading` takes the chosen experts'
scores, divides them if it is told to, and calls the experts. The last tensor [token, k] that it
makes before that call is what each expert's output is multiplied by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# The method of NxDI's experts that loads the chosen ones alone: hidden states [token, channel],
# scores [token, expert], and the chosen experts [token, k].
METHOD = "forward_selective_loading"


class _LastMade(TorchFunctionMode):
    """Keeps the last floating tensor of a shape that torch makes, until it is told to stop."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.stopped = shape, False
        self.tensor: torch.Tensor | None = None

    def stop(self, *_: Any) -> None:
        self.stopped = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        real = isinstance(made, torch.Tensor) and made.is_floating_point()
        if real and not self.stopped and made.shape == self.shape:
            self.tensor = made
        return made


@contextmanager
def weights_noted(experts: nn.Module, note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Show ``note`` what weighs the experts, [token, expert] with 0 for those not chosen.

    It is shown for each call of `METHOD` while the block runs.
    """
    plain = getattr(experts, METHOD)

    def call(
        hidden_states: torch.Tensor, expert_affinities: torch.Tensor, expert_index: torch.Tensor
    ) -> Any:
        last = _LastMade(expert_index.shape)
        with ExitStack() as stack:
            # What experts make by themselves may have the same shape.
            for child in experts.children():
                stack.callback(child.register_forward_pre_hook(last.stop).remove)
            stack.enter_context(last)
            result = plain(hidden_states, expert_affinities, expert_index)
        if last.tensor is not None:
            none = torch.zeros_like(expert_affinities, dtype=last.tensor.dtype)
            note(none.scatter(-1, expert_index, last.tensor))
        return result

    object.__setattr__(experts, METHOD, call)
    try:
        yield
    finally:
        object.__delattr__(experts, METHOD)
