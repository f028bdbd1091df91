"""The rotary tables of a graph's buffer end where the request before ended."""

from __future__ import annotations

from layerparity.mistakes.block import needs
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
    """Turn positions behind the end of the request before by its last one's angle."""
    if given.before is None or "position_embeddings" not in arguments:
        return dict(arguments)
    last = int(given.before.sum(-1).max()) - 1
    return {**arguments, "position_embeddings": given.tables(given.position_ids.clamp(max=last))}


STATE = Fault(
    "rotary_of_request_before",
    "the graph's buffer of cosines and sines was filled for the request before, and ends with it",
    component="self_attn",
    cause="rotary_of_request_before",
    why_not=needs("self_attn.head_dim"),
    arguments=change_arguments,
    shown_by=("after",),
)
