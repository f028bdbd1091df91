"""residual_sum: what a block, or a module inside it, adds up is taken twice, in part or not."""

from __future__ import annotations

import torch

from layerparity.anatomy.block import RESIDUAL
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.values import Values

# A share of a summand that is the whole of it.
_WHOLE = 0.02


class ResidualSum:
    """The golden's is the sum of the good parts, as of a residual add or of shared experts.

    The candidate's is not once each of them.
    """

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where other multiples of the parts give the candidate's sum."""
        out = evidence.values(evidence.local)
        stored = [evidence.values(each) for each in evidence.good]
        if out is None or not 2 <= len(stored) <= 3:
            return None
        shape = out.golden.shape
        known = [each for each in stored if each is not None and each.golden.shape == shape]
        if len(known) < len(stored):
            return None
        if not out.is_golden(torch.stack([each.golden for each in known]).sum(0)):
            return None
        times = _multiples(out, known)
        if max(times) - min(times) <= _WHOLE:
            # One factor of the whole sum.
            return None
        parts = [n * each.candidate for n, each in zip(times, known, strict=True)]
        if not out.shows(torch.stack(parts).sum(0)):
            return None
        odd = {a: n for a, n in zip(evidence.good, times, strict=True) if abs(n - 1) > _WHOLE}
        words = ", ".join(f"{name} {round(n, 3) + 0.0:g} times" for name, n in odd.items())
        inside = evidence.part != RESIDUAL and evidence.local.rpartition(":")[0]
        text = f"{inside or 'the block'} adds {words} where each part is added once"
        reasons = ["its parts pass, and these multiples of them give its numbers to rounding"]
        return Cause("residual_sum", text, reasons, grade=SHOWN) if odd else None


def _multiples(out: Values, parts: list[Values]) -> list[float]:
    """Return the multiples of the parts whose sum comes nearest to the candidate's output."""
    columns = torch.stack([each.candidate.flatten() for each in parts], 1)
    solved = torch.linalg.lstsq(columns, out.candidate.flatten().unsqueeze(1)).solution
    return [float(each) for each in solved.flatten()]


RULE = ResidualSum()
