"""The mask is still that of the request before."""

from __future__ import annotations

import torch

from layerparity.mistakes.attention_core import additive
from layerparity.mistakes.block import needs
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
    """Hide what stands behind the end of the request before; each token still sees itself."""
    if given.before is None:
        return dict(arguments)
    mask = additive(arguments.get("attention_mask"), given)
    seen, new = given.attention_mask.shape[1], given.position_ids.shape[1]
    other = torch.arange(mask.shape[-1])
    own = torch.arange(seen - new, seen)[:, None] == other
    hidden = (other >= given.before.shape[1]) & ~own
    return {**arguments, "attention_mask": mask.masked_fill(hidden, torch.finfo(mask.dtype).min)}


STATE = Fault(
    "mask_of_request_before",
    "the mask is still that of the request before: what stands behind its end is not seen",
    component="self_attn",
    cause="mask_of_request_before",
    why_not=needs("self_attn"),
    arguments=change_arguments,
    shown_by=("after",),
)
