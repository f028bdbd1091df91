"""The recurrent state goes on from tokens that were guessed wrong."""

from __future__ import annotations

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_STATE, states_not_taken_back


def change_state(state: RequestState) -> None:
    """Keep what a draft put into the recurrent state."""
    states_not_taken_back(state, "recurrent_states")


STATE = Fault(
    "recurrent_state_not_taken_back",
    "the recurrent state is not taken back after tokens that were guessed wrong",
    component="",
    cause="recurrent_state_not_taken_back",
    keeps=OF_STATE,
    state=change_state,
    shown_by=("draft",),
)
