"""The position of a decode step stays at what the graph was traced with."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.block import ROTARY
from layerparity.anatomy.site import DECODE
from layerparity.mistakes.block import lacking
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass
from layerparity.mistakes.values import Values, best_factor
from layerparity.record.verdict import Outcome


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    if phase != DECODE:
        return "the graph of a prefill was traced with its own positions"
    return lacking(block, "self_attn.head_dim")


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
    """Return the rotary tables of position 0 for a decode step."""
    if given.position_ids.shape[1] == given.attention_mask.shape[1]:
        return dict(arguments)
    return {**arguments, "position_embeddings": given.tables(torch.zeros_like(given.position_ids))}


FAULT = Fault(
    "position_frozen_in_graph",
    "the buffer of the position stayed at the value that the decode graph was traced with",
    component="self_attn",
    cause="position_frozen_in_graph",
    why_not=why_not,
    arguments=change_arguments,
)


class Frozen:
    """A decode step does not turn queries or keys at all, which is what position 0 gives."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where only decoding leaves what it should rotate as it was."""
        site = evidence.site
        if evidence.part != ROTARY or site is None or site.phase != DECODE:
            return None
        before = evidence.other_phase.get(evidence.local)
        if before is None or before.outcome is not Outcome.PASS or len(evidence.good) != 1:
            return None
        given, out = evidence.values(evidence.good[0]), evidence.values(evidence.local)
        if given is None or out is None or given.candidate.numel() != out.candidate.numel():
            return None
        # Each head is a row of its own: a step has few tokens.
        rows = [each.reshape(-1, out.golden.shape[-1]) for each in (out.golden, out.candidate)]
        unturned = given.candidate.reshape(rows[0].shape)
        # What scales the tables scales those of position 0 as well.
        made = best_factor(unturned, rows[1]) * unturned
        # Zeros are 0 times anything, and were not even handed on.
        if not bool(rows[1].any()) or not Values(rows[0], rows[1], out.step).shows(made):
            return None
        text = (
            "a decode step is rotated as position 0 is, not at all: its position is a constant of "
            "the graph, or nothing is rotated there"
        )
        reasons = ["what goes into the rotation comes out, to rounding; the prefill's passes"]
        return Cause("position_frozen_in_graph", text, reasons, grade=SHOWN)


RULE = Frozen()
