"""Feed a block another run's own values at every site, so that each is judged by one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.family import Tap
from layerparity.anatomy.site import Kind
from layerparity.numbers.arithmetic import Mode, Operation
from layerparity.ports.observed.canonical import by_token


@dataclass(frozen=True)
class Fed:
    """What another run recorded in a block, which goes on in place of what is computed there.

    ``values`` are floating [batch, token, ...] by local site, with the tokens of the pass; rotated
    keys may have those of former passes before them. ``mask`` is int64 [batch, token so far].
    """

    values: Mapping[str, torch.Tensor]
    mask: torch.Tensor
    tokens: int

    def instead_of(self, tap: Tap, value: torch.Tensor) -> torch.Tensor:
        """Return what goes on in place of what a tap saw, of its shape, strides and dtype.

        Padding, and numbers that are not finite, stay as they were computed; so does everything
        where nothing was recorded, or nothing of this shape.
        """
        if tap.local not in self.values or tap.spec.kind is not Kind.REAL:
            return value
        recorded, fresh = self.values[tap.local], value.clone()
        shown = by_token(tap, fresh, self.mask.shape[0], self.tokens)
        if tap.attention == "key":
            end = min(self.mask.shape[-1], shown.shape[1])
            shown = shown[:, max(end - recorded.shape[1], 0) : end]
        recorded = recorded[:, -shown.shape[1] :]
        if recorded.shape != shown.shape:
            return value
        real = self.mask[:, -shown.shape[1] :].bool()
        kept = real.view(*real.shape, *[1] * (shown.dim() - 2)) & recorded.isfinite()
        shown.copy_(torch.where(kept, recorded.to(shown.dtype), shown))
        return fresh


class _Replaced(Mode):
    """Let the first result of an operation that equals ``computed`` be ``instead``.

    Both are floating, of one shape; ``found`` says whether any did.
    """

    def __init__(self, computed: torch.Tensor, instead: torch.Tensor) -> None:
        super().__init__()
        self.computed, self.instead, self.found = computed, instead, False

    def run(self, func: Operation, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run one operation; return its result, or what stands in its place."""
        result = func(*args, **named)
        if self.found or not isinstance(result, torch.Tensor):
            return result
        if result.shape != self.computed.shape or result.dtype != self.computed.dtype:
            return result
        self.found = torch.equal(result, self.computed)
        return self.instead if self.found else result


def called_again(
    module: nn.Module,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    computed: torch.Tensor,
    instead: torch.Tensor,
) -> Any:
    """Return what a module puts out where a value inside it is replaced; None where it has none.

    ``computed`` and ``instead``, floating and of one shape, are the value as it was computed and
    what goes on; ``call`` are the module's arguments.
    """
    with _Replaced(computed, instead) as replaced:
        output = module.forward(*call[0], **call[1])
    return output if replaced.found else None
