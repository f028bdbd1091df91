"""Sequences of a batch read each other's slots."""

from __future__ import annotations

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_KEYS, Pair, full, read_changed


def change_state(state: RequestState) -> None:
    """Read, in each sequence, what the one before it in the batch has kept."""

    def change(kept: Pair, new: Pair, was_full: bool) -> Pair:
        return kept[0].roll(1, 0), kept[1].roll(1, 0)

    if full(state):
        read_changed(state, change)


STATE = Fault(
    "slots_of_another_sequence",
    "each sequence of a batch reads the slots of the one before it",
    component="self_attn",
    cause="slots_of_another_sequence",
    keeps=OF_KEYS,
    state=change_state,
    shown_by=("cache", "chunk"),
)
