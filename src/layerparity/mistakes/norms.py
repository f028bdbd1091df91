"""What a norm does, worked out from what it was given and gave out on both sides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.shape import blocks_of, finite
from layerparity.mistakes.values import Values, best_factor, same

# A share of variance from which on heads, not channels, are what differs.
BY_HEAD = 0.6
NORMS = ("self_attn.q_norm", "self_attn.k_norm")
Normed = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class NormCheck:
    """A norm's rows [row, channel] on both sides, and its weight as the golden's rows show it.

    ``given`` is what it was given, ``out`` what it gave out, ``heads`` how many heads a row has.
    """

    given: Values
    out: Values
    weight: torch.Tensor
    epsilon: float
    heads: int

    def shows(self, norm: Normed, weight: torch.Tensor | None = None) -> bool:
        """Say whether another norm, or another weight [channel], gives the candidate's rows."""
        own = self.weight if weight is None else weight
        return self.out.shows(norm(self.given.candidate) * own)

    @property
    def factors(self) -> torch.Tensor:
        """Each row's factor [row, 1] between the candidate and what it should have given out."""
        right = rms_normed(self.given.candidate, self.epsilon) * self.weight
        return (right * self.out.candidate).sum(-1, True) / right.square().sum(-1, True)


def norm_check(evidence: Evidence) -> NormCheck | None:
    """Return the numbers of a failing norm, where the golden is an RMSNorm of its good input."""
    if "norm" not in evidence.component.rpartition(".")[2] or len(evidence.good) != 1:
        return None
    given, out = evidence.values(evidence.good[0]), evidence.values(evidence.local)
    if given is None or out is None:
        return None
    width = out.golden.shape[-1]
    if given.golden[0].numel() % width or given.golden.numel() != out.golden.numel():
        return None
    rows = [
        Values(each.golden.reshape(-1, width), each.candidate.reshape(-1, width), each.step)
        for each in (given, out)
    ]
    epsilon = float(evidence.facts.get("rms_norm_eps", "1e-6") or 1e-6)
    normed = rms_normed(rows[0].golden, epsilon)
    weight = (normed * rows[1].golden).sum(0) / normed.square().sum(0).clamp(min=1e-300)
    if not rows[1].is_golden(normed * weight):
        return None
    size = evidence.fact("head_dim")
    heads = width // size if size and width % size == 0 else 1
    return NormCheck(rows[0], rows[1], weight, epsilon, heads)


def rms_normed(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return rows [row, channel] divided by their root mean square (Zhang, Sennrich 2019)."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)


def layer_normed(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return rows [row, channel] less their mean, by their deviation (Ba et al. 2016)."""
    return rms_normed(values - values.mean(-1, keepdim=True), epsilon)


def normed_by_head(values: torch.Tensor, epsilon: float, heads: int) -> torch.Tensor:
    """Return rows [row, channel], each head's channels divided by their own root mean square."""
    return rms_normed(values.unflatten(-1, (heads, -1)), epsilon).flatten(-2)


def own_weight(check: NormCheck) -> torch.Tensor:
    """Return the weight [channel] that fits the candidate's rows best, its norm being right."""
    normed = rms_normed(check.given.candidate, check.epsilon)
    return (normed * check.out.candidate).sum(0) / normed.square().sum(0).clamp(min=1e-300)


def one_factor_a_row(check: NormCheck) -> bool:
    """Say whether each row is right but for a factor of its own, and the factors differ."""
    right = rms_normed(check.given.candidate, check.epsilon) * check.weight
    factors = check.factors
    alike = best_factor(right, check.out.candidate)
    return check.out.shows(factors * right) and not same(
        check.out.candidate, alike * right, check.out.limit
    )


def between_heads(slopes: Sequence[float], heads: int) -> float | None:
    """Return the share of the channel slopes' variance that lies between heads; None if unknown."""
    values = finite(slopes)
    groups = blocks_of(values, heads)
    total = statistics.pvariance(values) if len(values) > 1 else 0.0
    if heads < 2 or not groups or not total:
        return None
    return statistics.pvariance([statistics.fmean(group) for group in groups]) / total
