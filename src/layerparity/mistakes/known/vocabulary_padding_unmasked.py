"""The head gives out logits of the rows that pad its vocabulary, which nobody masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerparity.anatomy.site import HEAD
from layerparity.mistakes.cause import SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.record.reason import ReasonKind

# Rows of the head are rounded up to a multiple of so many for each rank.
_MULTIPLE = 128


def plant(module: nn.Module, surgery: Surgery) -> None:
    """Pad the logits with those of rows of zeros, up to the next multiple; one more where even."""

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(values: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = exact(values)
            return functional.pad(logits, (0, _MULTIPLE - logits.shape[-1] % _MULTIPLE))

        return forward

    surgery.wrap(module, around)


FAULT = Fault(
    "vocabulary_padding_unmasked",
    "the vocabulary was rounded up, and the logits of ids that do not exist were not masked",
    component=HEAD,
    cause="vocabulary_padding_unmasked",
    plant=plant,
    stage=HEAD,
)


class PaddingShown:
    """The candidate has more logits than the vocabulary, and the golden has not."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the candidate's logits alone outnumber the vocabulary."""
        row = evidence.rows.get(evidence.local) if evidence.component == HEAD else None
        if row is None or row.why is None or row.why.kind is not ReasonKind.OTHER_SIZE:
            return None
        right, own = (row.why.values[side][-1] for side in ("golden", "candidate"))
        vocabulary = evidence.fact("vocab_size")
        if right != vocabulary or own <= vocabulary:
            return None
        text = (
            f"the head gives out logits of {own - vocabulary} ids that the model does not have: "
            "the rows that pad its vocabulary are not cut off"
        )
        reasons = [f"it gives out {own} logits a token, and the vocabulary has {vocabulary}"]
        return Cause("vocabulary_padding_unmasked", text, reasons, grade=SIGNS)


RULE = PaddingShown()
