"""Clean slopes: how far right computations seem to be off by a factor, since rounding is no noise.

What they differ by from the golden is slightly correlated with the numbers that are rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from scipy.special import ndtr, stdtrit

from layerparity.numbers.token_sums import CHANNEL

_FEW_WAYS = 4
# The usual limit on slopes in standard errors (channels have another): there few ways of a chain
# are to tell as much as many.
_FAR = 4.0
# No candidate is believed to have less than this part of the squared floor: one that computes as
# the reference does has no error, and the golden's slope is still there.
_LEAST = 0.25
_TINY = 1e-300


@dataclass(frozen=True)
class SlopeSample:
    """The slopes of clean ways as a sample: their mean square, and how many ways it is of.

    Of several groups it is each way's largest. A slope is in units of its own way's error: it is
    the correlation of what the way differs by with the reference. So it holds for a candidate that
    is noisier than the ways, or less noisy.
    """

    square: float
    ways: int

    @classmethod
    def pooled(cls, samples: Iterable[SlopeSample]) -> SlopeSample:
        """Return the sample of all ways of several sites."""
        several = list(samples)
        ways = sum(each.ways for each in several)
        total = sum(each.square * each.ways for each in several)
        return cls(total / ways if ways else 0.0, ways)

    @property
    def expected(self) -> float:
        """The squared slope to expect of one more clean way, in units of its error.

        Of few ways the mean square is itself uncertain: it grows as if a few more had shown it.
        """
        return self.square * (1 + _FEW_WAYS / max(self.ways, 1))


@dataclass(frozen=True)
class ChainedSample(SlopeSample):
    """The slopes of ways that each go through a chain of blocks.

    Each has a slope of its own there, which it keeps from block to block.
    """

    @classmethod
    def pooled(cls, samples: Iterable[SlopeSample]) -> SlopeSample:
        """Return the sample of several blocks: they show no more ways than one of them does."""
        several = list(samples)
        mean = SlopeSample.pooled(several).square
        return cls(mean, max((each.ways for each in several), default=0))

    @property
    def expected(self) -> float:
        """The squared slope to expect of one more clean way, in units of its error.

        The mean square of few ways is enlarged by what Student's t asks beyond the normal
        distribution where slopes are judged (Student 1908, Biometrika 6).
        """
        return self.square * _student(max(self.ways, 1))


@dataclass(frozen=True)
class CleanSlopes:
    """What slopes clean ways show at sites of a kind, by grouping.

    ``samples`` are in units of a way's own error.
    """

    samples: dict[str, SlopeSample] = field(default_factory=dict)

    def variance(
        self, grouping: str, noise: torch.Tensor, floor: torch.Tensor, squares: torch.Tensor
    ) -> torch.Tensor:
        """Return the variance of a clean candidate's slopes, float64 [group] as all of these.

        ``noise`` is the squared error of the candidate that no slope explains, ``floor`` the
        squared floor, ``squares`` are those of the reference.
        """
        if grouping not in self.samples:
            return torch.zeros_like(noise)
        # A channel's error is of few independent numbers: a slope may explain all of it.
        least = 1.0 if grouping == CHANNEL else _LEAST
        noise = torch.maximum(noise, least * floor)
        # A sample is p^2 / (q e), and the square of a slope p^2 / q^2: e / q lies between them.
        return self.samples[grouping].expected * noise / squares.clamp_min(_TINY)


@cache
def _student(ways: int) -> float:
    """Return the square of Student's t over a normal's at the limit on slopes."""
    # Both are at the same tail: however few the ways are, clean chains exceed it equally rarely.
    return float((stdtrit(ways, ndtr(_FAR)) / _FAR) ** 2)
