"""Every dimension of a head is rotated, where the model rotates the first few."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.block import ROTARY
from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.numeral import percent
from layerparity.mistakes.block import head_dim
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass
from layerparity.mistakes.known.rotary import growth_reasons
from layerparity.mistakes.rotary_tables import no_plain_tables, parameters, rotated_width, tables
from layerparity.mistakes.shape import blocks_of
from layerparity.mistakes.turning import keeps_lengths, turning_of


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    reason = no_plain_tables(block)
    if not reason and rotated_width(block) == head_dim(block):
        return "this model rotates whole heads by design"
    return reason


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
    """Return rotary tables as wide as a head."""
    theta, size = parameters(given.config)["rope_theta"], sizes_of(given.config).head_dim
    whole = tables(given.position_ids, size, theta, given.dtype)
    return {**arguments, "position_embeddings": whole}


FAULT = Fault(
    "rope_full_instead_of_partial",
    "all dimensions of a head rotated, the model rotates the first few",
    component="self_attn",
    cause="rope_full_instead_of_partial",
    why_not=why_not,
    arguments=change_arguments,
)


class FullRope:
    """Rotated q or k is wrong in the channels from ``rotary_dim`` on, which pass unrotated."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the channels that must not rotate have changed."""
        rotary, width = evidence.fact("rotary_dim"), evidence.fact("head_dim")
        slopes = evidence.profile("channel")
        if evidence.part != ROTARY or not 0 < rotary < width or not slopes:
            return None
        heads = blocks_of(slopes, len(slopes) // width)
        beyond = [abs(slope) for head in heads for slope in head[rotary:]]
        if not beyond or max(beyond) < 0.01:
            return None
        turning = turning_of(evidence)
        refuted = turning is not None and not turning.turns(width)
        if refuted or not keeps_lengths(evidence, width):
            return None
        text = f"all {width} channels of a head are rotated; the model rotates the first {rotary}"
        return Cause(
            "rope_full_instead_of_partial",
            text,
            [
                f"channels {rotary} to {width - 1} should pass unrotated, and their slopes are off "
                f"by up to {percent(max(beyond))}",
                *growth_reasons(evidence),
            ],
            grade=SIGNS if turning is None else SHOWN,
        )


RULE = FullRope()
