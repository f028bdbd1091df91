"""What a router does, worked out from its stored logits, choices and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from layerparity.mistakes.block import CHOICES, LOGITS, WEIGHTS
from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.values import best_factor, same

GATES = ("mlp.gate", "mlp.router")
Score = Callable[[torch.Tensor], torch.Tensor]
SCORES: dict[str, Score] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "no activation": lambda logits: logits,
}


@dataclass(frozen=True)
class Weighing:
    """How chosen experts are weighed: by which scores, divided by their sum or not, times what."""

    score: str
    divided: bool
    factor: float


@dataclass(frozen=True)
class RoutersSeen:
    """A router's real tokens on both sides: how each weighs, and whether it chooses the largest.

    ``golden`` and ``candidate`` are None where no known way reproduces the weights. The two shares
    are those of tokens whose experts are those of the largest scores, without any bias.
    """

    golden: Weighing | None
    candidate: Weighing | None
    golden_largest: float
    candidate_largest: float


def routing_of(evidence: Evidence) -> RoutersSeen | None:
    """Return what both routers do; None where a logit, choice or weight is not stored."""
    stored = [evidence.values(local) for local in (LOGITS, CHOICES, WEIGHTS)]
    if any(each is None for each in stored):
        return None
    logits, choices, weights = (each for each in stored if each is not None)
    limit = max(weights.limit, logits.limit)
    sides = [
        (logits.golden, choices.golden.long(), weights.golden),
        (logits.candidate, choices.candidate.long(), weights.candidate),
    ]
    if any(bool((chosen >= own.shape[-1]).any()) for own, chosen, _ in sides):
        return None
    ways = [_weighing(own, chosen, weighed, limit) for own, chosen, weighed in sides]
    largest = [_largest(own, chosen, evidence.facts) for own, chosen, _ in sides]
    return RoutersSeen(ways[0], ways[1], largest[0], largest[1])


def _weighing(
    logits: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, limit: float
) -> Weighing | None:
    """Return what makes weights [token, k] of logits [token, expert] for the ids chosen."""
    for name, score in SCORES.items():
        own = score(logits).gather(-1, chosen)
        for divided in (True, False):
            made = own / own.sum(-1, keepdim=True) if divided else own
            factor = best_factor(made, weights)
            if same(weights, factor * made, limit):
                return Weighing(name, divided, factor)
    return None


def _largest(logits: torch.Tensor, chosen: torch.Tensor, facts: Mapping[str, str]) -> float:
    """Return the share of tokens whose chosen experts are those of the largest scores.

    Where experts are in groups, the best groups are taken first, by their two largest scores.
    """
    scores = logits.sigmoid()
    groups, kept = (int(facts.get(name, "1") or 1) for name in ("n_group", "topk_group"))
    if groups > 1:
        by_group = scores.unflatten(-1, (groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        shown = torch.zeros(by_group.shape[:2]).scatter(1, best, 1.0).bool()
        scores = by_group.masked_fill(~shown.unsqueeze(-1), -1.0).flatten(-2)
    expected = scores.topk(chosen.shape[-1], dim=-1).indices.sort(-1).values
    return float((expected == chosen.sort(-1).values).all(-1).double().mean())
