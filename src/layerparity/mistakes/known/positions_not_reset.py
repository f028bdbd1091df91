"""Positions go on from the request before, but in the first pass."""

from __future__ import annotations

from layerparity.mistakes.block import needs
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
    """Turn a later pass by positions that count the request before, too."""
    first = given.position_ids.shape[1] == given.attention_mask.shape[1]
    if given.before is None or first or "position_embeddings" not in arguments:
        return dict(arguments)
    ended = int(given.before.sum(-1).max())
    return {**arguments, "position_embeddings": given.tables(given.position_ids + ended)}


STATE = Fault(
    "positions_not_reset",
    "positions of later passes go on from the request before",
    component="self_attn",
    cause="positions_not_reset",
    why_not=needs("self_attn.head_dim"),
    arguments=change_arguments,
    shown_by=("chunk", "draft"),
)
