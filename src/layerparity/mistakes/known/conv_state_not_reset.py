"""The short convolution begins with the last tokens of the request before."""

from __future__ import annotations

from layerparity.mistakes.fault import Fault, RequestState
from layerparity.mistakes.requests import OF_STATE, states_left


def change_state(state: RequestState) -> None:
    """Begin with the convolution's state of the request before."""
    states_left(state, "conv_states")


STATE = Fault(
    "conv_state_not_reset",
    "the convolution's state is not reset: a request begins with the last tokens of the one before",
    component="",
    cause="conv_state_not_reset",
    keeps=OF_STATE,
    state=change_state,
    shown_by=("after",),
)
