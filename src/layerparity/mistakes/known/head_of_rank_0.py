"""Every rank multiplies by the rows of rank 0's share of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.shards import padded
from layerparity.anatomy.site import HEAD
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.values import ENOUGH, Values

_ID, _RANKS = "head_of_rank_0", 2
# More ranks than this share no vocabulary.
_MOST_RANKS = 64


def _repeated(logits: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return logits [..., vocabulary] in which the first of some shares stands in each place."""
    whole = logits.shape[-1]
    share = padded(whole, ranks) // ranks
    return torch.cat([logits[..., :share]] * ranks, -1)[..., :whole]


def plant(module: nn.Module, surgery: Surgery) -> None:
    """Put the logits of the first half of the vocabulary in the place of the second, too."""

    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        return lambda values: _repeated(exact(values), _RANKS)

    surgery.wrap(module, around)


FAULT = Fault(
    _ID,
    "the rank was traced as 0: every rank multiplied by rank 0's part of the vocabulary",
    component=HEAD,
    cause=_ID,
    plant=plant,
    stage=HEAD,
    degree=_RANKS,
)


def _shows(logits: Values, made: torch.Tensor) -> bool:
    """Say whether logits [token, vocabulary] are the candidate's to rounding, not the golden's.

    Nothing is fitted: parts of a single token's logits are as good as several tokens.
    """

    def parts(values: torch.Tensor) -> torch.Tensor:
        width = values.shape[-1] // ENOUGH
        return values[:, : width * ENOUGH].reshape(-1, max(width, 1))

    sides = Values(parts(logits.golden), parts(logits.candidate), logits.step)
    return sides.shows(parts(made))


class HeadOfRankZero:
    """The logits of rank 0's share of the vocabulary stand in the place of every other share."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where every share of the logits is the golden's first."""
        logits = evidence.values(evidence.local) if evidence.component == HEAD else None
        if logits is None:
            return None
        vocabulary = logits.golden.shape[-1]
        degree = evidence.fact("tp_degree", 1)
        for ranks in (degree, *range(2, min(_MOST_RANKS, vocabulary) + 1)):
            if ranks < 2 or not _shows(logits, _repeated(logits.golden, ranks)):
                continue
            share = padded(vocabulary, ranks) // ranks
            text = (
                f"every rank multiplies by rank 0's part of the vocabulary, {share} rows of "
                f"{vocabulary}, as they do where the rank is 0 while the graph is traced"
            )
            reasons = [
                f"the logits of ids 0 to {share - 1} stand at all {ranks} parts, to rounding"
            ]
            return Cause(_ID, text, reasons, grade=SHOWN)
        return None


RULE = HeadOfRankZero()
