"""Every rank looks ids up within the bounds of rank 0's share of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerparity.anatomy.shards import padded
from layerparity.anatomy.site import EMBEDDING, within
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.values import Values

_RANKS = 2
# More ranks than this share no vocabulary.
_MOST_RANKS = 64


def _table(module: nn.Module) -> nn.Module:
    """Return the tokens' table of an embedding: itself, or the first of its modules."""
    return next(module.children(), module)


def why_not(module: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    return "" if isinstance(_table(module), nn.Embedding) else "this embedding is no plain table"


def plant(module: nn.Module, surgery: Surgery) -> None:
    """Sum what each rank finds at an id: the row of its own share, or nothing from its end on."""
    table: Any = _table(module)
    exact = table.forward
    share = padded(len(table.weight), _RANKS) // _RANKS

    def forward(ids: torch.Tensor) -> torch.Tensor:
        # What the model computes of a row (a scale) is linear in it.
        parts = []
        for rank in range(_RANKS):
            there = (ids < share) & (ids + rank * share < len(table.weight))
            row: torch.Tensor = exact(torch.where(there, ids + rank * share, 0))
            parts.append(row * there.unsqueeze(-1))
        return torch.stack(parts).sum(0)

    surgery.set(table, "forward", forward)


FAULT = Fault(
    "embedding_of_rank_0",
    "the rank was traced as 0: every rank looked ids up within rank 0's part of the vocabulary",
    component=EMBEDDING,
    cause="embedding_of_rank_0",
    why_not=why_not,
    plant=plant,
    stage=EMBEDDING,
    degree=_RANKS,
)


class RankZero:
    """Ids past a rank's share give zeros; the others give the sum of a row of every share."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the ids' rows are those of ranks that all think they are 0."""
        if not within(evidence.component, EMBEDDING) or evidence.site is None:
            return None
        given, out = evidence.values(f"{EMBEDDING}:in"), evidence.values(evidence.local)
        if given is None or out is None or given.golden.dim() != 1:
            return None
        ids = given.golden.long()
        known = {int(each): row for each, row in zip(ids, out.golden, strict=True)}
        vocabulary = evidence.fact("vocab_size")
        # Of a dump no size is known.
        for ranks in range(2, min(_MOST_RANKS, vocabulary) + 1):
            share = padded(vocabulary, ranks) // ranks
            sums = _summed(ids, known, share, vocabulary)
            if _fits(out, ids, share, sums):
                text = (
                    f"every rank looks ids up within rank 0's part of the vocabulary, {share} of "
                    f"{vocabulary}, as they do where the rank is 0 while the graph is traced"
                )
                reasons = [
                    f"ids from {share} on give zeros",
                    f"the rows of {len(sums)} smaller ones are sums of a row of each of {ranks} "
                    "parts, to rounding",
                ]
                return Cause("embedding_of_rank_0", text, reasons, grade=SHOWN)
        return None


def _summed(
    ids: torch.Tensor, known: dict[int, torch.Tensor], share: int, vocabulary: int
) -> dict[int, torch.Tensor]:
    """Return, by token, the sum of the rows [channel] at an id of all shares, where all are known.

    The golden's rows are known of the ids [token] that it was given.
    """
    sums = {}
    for token, each in enumerate(ids.tolist()):
        rows = range(each, vocabulary, share)
        if each < share and all(row in known for row in rows):
            sums[token] = torch.stack([known[row] for row in rows]).sum(0)
    return sums


def _fits(out: Values, ids: torch.Tensor, share: int, sums: dict[int, torch.Tensor]) -> bool:
    """Say whether ids [token] from ``share`` on give zeros and the sums are the candidate's."""
    past = ids >= share
    if not sums or not bool(past.any()) or bool(out.candidate[past].any()):
        return False
    made = torch.stack(list(sums.values()))
    held = out.candidate[list(sums)]
    off = (held - made).norm(dim=1) / made.norm(dim=1)
    return bool((off <= out.limit).all())


RULE = RankZero()
