"""Tell a router which experts to choose, so that only arithmetic is left to compare.

Its own scores still weigh the experts. Whatever it would have chosen from is kept in ``scores``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from layerparity.numbers.arithmetic import Mode, Operation


class Replay(Mode):
    """Answer the router's top-k with given choices.

    ``choices`` is int64 [token, k], or None to only listen; a top-k of another size, or over
    another number of scores than ``experts``, is somebody else's. ``scores`` is [token, expert]
    after the router ran, else None.
    """

    def __init__(self, choices: torch.Tensor | None, experts: int) -> None:
        super().__init__()
        self.choices, self.experts = choices, experts
        self.scores: torch.Tensor | None = None

    def run(self, func: Operation, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run one operation; a router's top-k returns the given choices and their scores."""
        if func not in (torch.topk, torch.Tensor.topk) or not self._is_router(args, named):
            return func(*args, **named)
        scores: torch.Tensor = args[0] if args else named["input"]
        self.scores = scores
        if self.choices is None:
            return func(*args, **named)
        chosen = self.choices.to(scores.device).view(*scores.shape[:-1], -1)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def _is_router(self, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        scores = args[0] if args else named["input"]
        k = args[1] if len(args) > 1 else named.get("k")
        wide = bool(scores.dim() and scores.shape[-1] == self.experts)
        return wide and (self.choices is None or k == self.choices.shape[-1])
