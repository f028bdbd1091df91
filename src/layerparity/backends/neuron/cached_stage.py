"""Make a stage with a static cache a function of tensors: its part of the cache goes in and out.

A compiled graph cannot write to a cache that lies outside of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerparity.ground.errors import UserError

CACHE = "past_key_values"
# A sliding window also counts its tokens in a Python number, which a graph would freeze.
_KINDS = ("StaticLayer",)
_KEYS, _VALUES, _LENGTH = "keys", "values", "length"


def cache_among(args: Sequence[Any]) -> Any:
    """Return the cache among a stage's keyword arguments, or None."""
    named = (each for each in args if isinstance(each, dict))
    return next((each[CACHE] for each in named if each.get(CACHE) is not None), None)


class CachedStage(nn.Module):
    """A stage that is called with, and returns, the tensors of its cache as well.

    These are keys and values [batch, head, token, channel] of the stage's block, absent before the
    first pass, and how many tokens they hold, int64 [].
    """

    def __init__(self, inner: nn.Module, cache: Any, mode: str) -> None:
        """``mode`` is how stages are compiled. Raises UserError for a cache of another kind."""
        super().__init__()
        self.inner = inner
        self._cache = cache
        numbers = {each.layer_idx for each in inner.modules() if hasattr(each, "layer_idx")}
        # A block that takes another's keys and values has no layer in the cache.
        kinds = {type(each).__name__ for n, each in enumerate(cache.layers) if n in numbers}
        if len(numbers) != 1 or not kinds or not kinds <= {*_KINDS}:
            has = ", ".join(sorted(kinds)) or "no block of its own"
            raise UserError(
                f"compile={mode} takes the static cache of one block, and this stage has {has}",
                "use generate.max_new_tokens=0 or backend.compile=lazy.",
            )
        (self._number,) = numbers

    @property
    def _kept(self) -> Any:
        return self._cache.layers[self._number]

    def state(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the cached tensors as they are before a pass."""
        state = {_LENGTH: self._kept.cumulative_length.to(device)}
        if self._kept.is_initialized:
            state |= {_KEYS: self._kept.keys, _VALUES: self._kept.values}
        return state

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put the cached tensors that a pass returned where the next one finds them."""
        if not self._kept.is_initialized:
            self._kept.lazy_initialization(state[_KEYS], state[_VALUES])
        self._kept.keys, self._kept.values = state[_KEYS], state[_VALUES]
        self._kept.cumulative_length = state[_LENGTH]

    def forward(
        self, given: torch.Tensor, arguments: dict[str, Any], state: dict[str, torch.Tensor]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return what the stage returns, and the cached tensors after it; ``state`` stays."""
        # The stage writes into copies: the cache of the run stays until `keep`.
        cache, own = copy.copy(self._cache), copy.copy(self._kept)
        cache.layers = list(self._cache.layers)
        cache.layers[self._number] = own
        # Its update writes in place.
        own.cumulative_length = state[_LENGTH].clone()
        if _KEYS in state:
            own.keys, own.values = state[_KEYS].clone(), state[_VALUES].clone()
        result = self.inner(given, {**arguments, CACHE: cache})
        return result, {_KEYS: own.keys, _VALUES: own.values, _LENGTH: own.cumulative_length}
