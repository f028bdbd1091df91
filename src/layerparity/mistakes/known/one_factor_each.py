"""One factor for each token, or for each channel: what a temperature or a norm's weights do."""

from __future__ import annotations

import torch

from layerparity.ground.numeral import numeral
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.norms import norm_check
from layerparity.mistakes.values import Values

# With fewer numbers a factor fits anything.
_FEWEST = 8
# A few tokens may differ from all others; of a slice or a head, all channels share one factor.
_APART = 4


class OneFactorEach:
    """Tokens, or channels, are the golden's times a factor of their own."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where such factors give the candidate's numbers to rounding."""
        own = evidence.values(evidence.local)
        if own is None or own.golden.dim() < 2 or norm_check(evidence) is not None:
            return None
        shape, axes = own.golden.shape, tuple(range(own.golden.dim()))
        # One factor for all is another cause, and fits both ways.
        if min(shape[0], shape[-1]) < _FEWEST or own.shows(_fitted(own, axes)[0]):
            return None
        for shared, what, why in (
            (axes[1:], "token", "a scale of each position, such as attention's temperature"),
            (axes[:-1], "channel", "a vector of weights, such as a norm's"),
        ):
            made, factors = _fitted(own, shared)
            if own.shows(made) and _of_their_own(factors.flatten(), own.limit, what):
                least, most = (numeral(float(each), 3) for each in factors.aminmax())
                text = (
                    f"each {what} is the golden's times a factor of its own ({least} to {most}): "
                    f"{why}, is wrong or left out"
                )
                reasons = [f"one factor a {what} gives the candidate's numbers to rounding"]
                return Cause("one_factor_each", text, reasons, grade=SHOWN)
        return None


def _of_their_own(factors: torch.Tensor, limit: float, what: str) -> bool:
    """Say whether factors, float64 [group], are each group's own, not those of a few.

    Positions may share a scale by stretches, channels share no weight.
    """
    away = (factors - factors.median()).abs() > limit
    distinct = torch.unique((factors / limit).round()).numel()
    # Nothing at all is no multiple of something.
    nothing = bool((factors.abs() <= limit).any())
    return (
        not nothing
        and int(away.sum()) >= _APART
        and (what == "token" or distinct > len(factors) // 2)
    )


def _fitted(own: Values, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the golden's numbers [token, ..., channel] times their best factors, and these.

    One factor is shared along ``dims``; both are float64.
    """
    squares = own.golden.square().sum(dims, keepdim=True)
    factors = (own.golden * own.candidate).sum(dims, keepdim=True) / squares.clamp_min(1e-300)
    return factors * own.golden, factors


RULE = OneFactorEach()
