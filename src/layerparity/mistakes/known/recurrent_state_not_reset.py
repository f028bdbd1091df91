"""The recurrent state begins as the request before left it."""

from __future__ import annotations

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_STATE, states_left


def change_state(state: RequestState) -> None:
    """Begin with the recurrent state of the request before."""
    states_left(state, "recurrent_states")


STATE = Fault(
    "recurrent_state_not_reset",
    "the recurrent state is not reset: a request begins with what the one before left",
    component="",
    cause="recurrent_state_not_reset",
    keeps=OF_STATE,
    state=change_state,
    shown_by=("after",),
)
