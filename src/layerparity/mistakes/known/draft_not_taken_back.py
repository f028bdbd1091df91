"""Tokens that were guessed wrong stay in the cache."""

from __future__ import annotations

from layerparity.mistakes.fault import Fault, RequestState


def change_state(state: RequestState) -> None:
    """Take nothing back."""
    state.taking_back = lambda: lambda: None


STATE = Fault(
    "draft_not_taken_back",
    "what was guessed wrong is not taken back: its keys, values or states stay in the cache",
    component="",
    cause="draft_not_taken_back",
    state=change_state,
    shown_by=("draft",),
)
