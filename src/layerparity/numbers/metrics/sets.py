"""Sets of indices: the experts that a router chose for each token, in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import Chunk


def sets_agree(golden: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return bool [token]: whether rows of two integer [token, k] tensors hold the same set."""
    # Sorted rows also tell an expert that is named twice from two.
    left, right = golden.long().sort(-1).values, candidate.long().sort(-1).values
    return (left == right).all(-1)


def by_expert(choices: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts by number, and their weights with them.

    ``choices`` are whole numbers and ``weights`` floating, [..., k] both: the order of top-k is
    that of the scores, and of equal ones undefined.
    """
    choices, order = choices.sort(dim=-1)
    return choices, weights.gather(-1, order)


@dataclass(frozen=True)
class SetAgreement:
    """Tokens with equal sets / all tokens, between 0 and 1."""

    kinds: tuple[Kind, ...] = (Kind.INDEX_SET,)

    def start(self) -> tuple[int, int]:
        """Return (agreeing, all) of nothing."""
        return (0, 0)

    def update(self, state: tuple[int, int], chunk: Chunk) -> tuple[int, int]:
        """Count the chunk's tokens."""
        agree = sets_agree(chunk.golden, chunk.candidate)
        return state[0] + int(torch.count_nonzero(agree)), state[1] + agree.numel()

    def compute(self, state: tuple[int, int]) -> float:
        """Return the fraction; NaN of nothing."""
        return state[0] / state[1] if state[1] else float("nan")


METRICS = {"set_agreement": SetAgreement()}
