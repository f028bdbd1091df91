"""Attention sinks are missing, where attention looks through a window only."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.block import ATTENTION_CORE
from layerparity.mistakes.attention_core import attend_with, sinkless
from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.kernels import stretched

_SINKS = ".sinks"


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    gone = lacking(block, "self_attn.sinks")
    if gone:
        return gone
    if not find(block, "self_attn.sliding_window"):
        return "layers of full attention keep their sinks"
    return ""


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Let the windowed attention of a block attend without its sinks."""
    attend_with(block, surgery, sinkless)


FAULT = Fault(
    "sinks_missing_in_window",
    "attention sinks were put into the full attention alone, the windowed one was missed",
    component="self_attn",
    cause="sinks_missing_in_window",
    why_not=why_not,
    plant=plant,
)


class NoSinks:
    """A head's context is the golden's, made larger by what the sink should have taken."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where each token and head is off by a factor above one."""
        # The checkpoint says whether the model has sinks at all.
        if evidence.part != ATTENTION_CORE or not any(
            each.endswith(_SINKS) for each in evidence.tensors
        ):
            return None
        own = evidence.values(evidence.local)
        factors = None if own is None else stretched(own)
        if own is None or factors is None or float(factors.min()) < 1 - own.limit:
            return None
        text = "the attention sinks are left out, or take too little"
        reasons = [
            "each head's context is right but for a factor above one, up to "
            f"{float(factors.max()):.2f}: what the sink should take is spread over the tokens"
        ]
        return Cause("sinks_missing_in_window", text, reasons, grade=SHOWN)


RULE = NoSinks()
