"""The last slot of a cache is never written."""

from __future__ import annotations

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_KEYS, Pair, full, read_changed


def change_state(state: RequestState) -> None:
    """Keep zeros in the last slot."""

    def change(kept: Pair, new: Pair, was_full: bool) -> Pair:
        for each in kept:
            each[:, :, -1].zero_()
        return kept

    if full(state):
        read_changed(state, change)


STATE = Fault(
    "last_slot_not_written",
    "the cache is full one token early: its last slot is never written",
    component="self_attn",
    cause="last_slot_not_written",
    keeps=OF_KEYS,
    state=change_state,
    shown_by=("cache", "chunk"),
)
