"""What is kept of one request for its next pass, or for the next request, as mistakes change it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from layerparity.mistakes.fault import Cached, RequestState

# Tokens of a block of a paged cache, as engines have them; most of them the first.
BLOCK_SIZES = (16, 32, 64, 128)
# The first slots of a pass, int64 [token], its first and how many there are: where they go instead.
Slots = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
# What is kept [batch, head, slot, channel], of the request before alike, and how many are counted,
# int64: what attention reads.
Reads = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Keys and values.
Pair = tuple[torch.Tensor, torch.Tensor]
# What attention would read, what is new of it, and whether a window was full before: what it reads.
Change = Callable[[Pair, Pair, bool], Pair]
# What a block's cache keeps: keys and values of all tokens, of a window, or a state in their place.
OF_KEYS, OF_WINDOW, OF_STATE = "keys and values", "keys and values of a window", "a state"
_PARTS = ("keys", "values")


def kind_of(cached: Cached) -> str:
    """Return what a block's cache keeps; empty for what is none of these."""
    if hasattr(cached, "cumulative_length"):
        return OF_WINDOW if cached.is_sliding else OF_KEYS
    return OF_STATE if hasattr(cached, "recurrent_states") else ""


def full(state: RequestState) -> bool:
    """Say whether a block's cache has a slot for each token."""
    return kind_of(state.cached) == OF_KEYS


def read_changed(state: RequestState, change: Change) -> None:
    """Let attention read what ``change`` makes of it; slots that it writes to stay written to."""
    cached = state.cached
    usual = cached.update

    def update(keys: torch.Tensor, values: torch.Tensor, *args: object, **named: object) -> Pair:
        was_full = getattr(cached, "cumulative_length_int", 0) >= cached.max_cache_len
        return change(usual(keys, values, *args, **named), (keys, values), was_full)

    cached.update = update


def written_elsewhere(state: RequestState, slots: Slots) -> None:
    """Put keys and values into other slots than those that attention reads."""
    if not full(state):
        return
    cached = state.cached
    usual = cached.update

    def update(keys: torch.Tensor, values: torch.Tensor, *args: object, **named: object) -> Pair:
        if not cached.is_initialized:
            cached.lazy_initialization(keys, values)
        start = cached.cumulative_length.clone()
        before = [getattr(cached, each).clone() for each in _PARTS]
        usual(keys, values, *args, **named)
        places = slots(torch.arange(keys.shape[2], device=keys.device), start, cached.max_cache_len)
        for name, held, new in zip(_PARTS, before, (keys, values), strict=True):
            getattr(cached, name).copy_(held.index_copy(2, places, new))
        return cached.keys, cached.values

    cached.update = update


def read_otherwise(state: RequestState, reads: Reads) -> None:
    """Let attention read other keys and values than are kept; the request before's at hand."""
    before, cached = state.before, state.cached
    if not full(state) or before is None or not getattr(before, "is_initialized", False):
        return
    # Not the cache itself, which may hold those of a request before it.
    held = before.keys, before.values

    def change(kept: Pair, new: Pair, was_full: bool) -> Pair:
        keys, values = (
            reads(own, _fitted(other, cached), counted(cached))
            for own, other in zip(kept, held, strict=True)
        )
        return keys, values

    read_changed(state, change)


def counted(cached: Cached) -> torch.Tensor:
    """Return how many tokens a block's cache counts, int64."""
    count: torch.Tensor = cached.cumulative_length
    return count


def slots_of(kept: torch.Tensor) -> torch.Tensor:
    """Return the numbers of slots of [batch, head, slot, channel], int64 [1, 1, slot, 1]."""
    return torch.arange(kept.shape[2], device=kept.device).view(1, 1, -1, 1)


def states_left(state: RequestState, left: str) -> None:
    """Let a request begin with a kind of state of the one before, and its others of zeros."""
    cached, before = state.cached, state.before
    held = getattr(before, left, None)
    if not isinstance(held, dict) or not isinstance(getattr(cached, left, None), dict):
        return
    for kind in ("conv_states", "recurrent_states"):
        for index, value in getattr(before, kind).items():
            if isinstance(value, torch.Tensor):
                kept = value.clone() if kind == left else torch.zeros_like(value)
                getattr(cached, kind)[index] = kept
                getattr(cached, f"is_{kind}_initialized")[index] = True
    cached.conv_kernel_size = dict(before.conv_kernel_size)
    cached.dtype, cached.device = before.dtype, before.device
    cached.has_previous_state = dict.fromkeys(cached.has_previous_state, True)


def states_not_taken_back(state: RequestState, kind: str) -> None:
    """Keep, of what a draft did to a block's states, a kind."""
    cached, usual = state.cached, state.taking_back
    if not isinstance(getattr(cached, kind, None), dict):
        return

    def taking_back() -> Callable[[], None]:
        back = usual()

        def take_back() -> None:
            drafted = {n: v.clone() for n, v in getattr(cached, kind).items() if v is not None}
            back()
            for index, value in drafted.items():
                getattr(cached, kind)[index].copy_(value)

        return take_back

    state.taking_back = taking_back


def _fitted(kept: torch.Tensor, cached: Cached) -> torch.Tensor:
    """Return another request's [batch, head, slot, channel] with as many rows and slots as ours."""
    more = cached.max_cache_len - kept.shape[2]
    fitted = functional.pad(kept, (0, 0, 0, max(more, 0)))[:, :, : cached.max_cache_len]
    rows = torch.arange(cached.batch_size, device=kept.device) % kept.shape[0]
    return fitted[rows]
