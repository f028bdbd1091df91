"""expert_biases: each expert adds a wrong constant, weighed as its router weighs it."""

from __future__ import annotations

import torch

from layerparity.mistakes.block import CHOICES, WEIGHTS
from layerparity.mistakes.cause import SHOWN, Cause, Evidence

# Tokens for each constant that is fitted; with fewer, anything fits.
_TOKENS = 2


class ExpertBiases:
    """One constant an expert and channel, times its routing weight, gives the candidate."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the experts are off by constants of their own."""
        if evidence.component not in ("mlp.experts", "mlp"):
            return None
        stored = [evidence.values(local) for local in (evidence.local, CHOICES, WEIGHTS)]
        if any(each is None for each in stored):
            return None
        own, choices, weights = (each for each in stored if each is not None)
        alike = choices.candidate.shape == weights.candidate.shape
        if own.golden.dim() != 2 or len(own.golden) != len(choices.golden) or not alike:
            return None
        experts, chosen = choices.candidate.unique(return_inverse=True)
        shares = torch.zeros(len(chosen), len(experts), dtype=own.golden.dtype)
        shares.scatter_(1, chosen, weights.candidate)
        shares = shares[:, shares.any(0)]
        off = own.candidate - own.golden
        # One constant for all tokens is no expert's.
        if len(chosen) < _TOKENS * shares.shape[1] or own.shows(own.golden + off.mean(0)):
            return None
        constants = torch.linalg.lstsq(shares, off, driver="gelsd").solution
        if not own.shows(own.golden + shares @ constants):
            return None
        text = (
            "the biases of the experts' last projection are wrong: summed into one, another "
            "expert's, or lost"
        )
        reasons = [
            f"one constant a channel for each of {shares.shape[1]} experts, times its routing "
            "weight, gives its numbers to rounding"
        ]
        return Cause("expert_biases", text, reasons, grade=SHOWN)


RULE = ExpertBiases()
