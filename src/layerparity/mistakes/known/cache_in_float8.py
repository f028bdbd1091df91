"""Keys and values are rounded to eight bits on their way into the cache."""

from __future__ import annotations

import torch

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_KEYS, Pair, full
from layerparity.numbers.operands import ROUNDED


def _of(operands: str) -> Fault:
    """Return it for a cache of what ``operands=`` calls so."""
    rounded = ROUNDED[operands].rounded

    def change_state(state: RequestState) -> None:
        cached = state.cached
        usual = cached.update

        def update(keys: torch.Tensor, values: torch.Tensor, *args: object, **more: object) -> Pair:
            pair: Pair = usual(rounded(keys), rounded(values), *args, **more)
            return pair

        if full(state):
            cached.update = update

    kind = operands.removeprefix("cache_")
    return Fault(
        "cache_in_float8",
        f"keys and values are cached in {kind}; where that is meant, operands=[{operands}], of "
        "the golden too, judges by it",
        component="self_attn",
        cause="cache_in_float8",
        keeps=OF_KEYS,
        state=change_state,
        shown_by=("cache", "chunk", "after"),
    )


STATES = (_of("cache_float8_e4m3"), _of("cache_float8_e5m2"))
STATE = STATES[0]
