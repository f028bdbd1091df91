"""The seeds' table: one fixed limit for each metric, the same at every site and for every dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from layerparity.anatomy.site import Kind
from layerparity.judge.tolerances.base import EndLimits
from layerparity.numbers.closeness import Closeness
from layerparity.record.verdict import SIMILARITIES, Breach
from layerparity.settings.key import key


@dataclass
class FixedTolerance(EndLimits):
    """A value must be under a ceiling (the differences) or over a floor (the similarities).

    It cries wolf over bfloat16's rounding and misses small slips; it is what people know.
    """

    name: str = "fixed"
    max_abs_diff: float = key(0.01, "largest difference of any element, below", least=0)
    mean_abs_diff: float = key(0.001, "mean difference, below", least=0)
    similarity_percentage: float = key(95.0, "percentage of similar elements, above", least=0)
    cosine_similarity: float = key(0.99, "cosine of both tensors, above", least=-1, most=1)
    pearson: float = key(0.99, "correlation of both tensors, above", least=-1, most=1)
    rtol: float = key(1e-3, "what makes elements similar: a part of the candidate's value", least=0)
    atol: float = key(1e-3, "and a difference that is allowed beside it", least=0)

    @property
    def knows_rounding(self) -> bool:
        """No: its limits are the same at every site and for every dtype."""
        return False

    @property
    def knows_chains(self) -> bool:
        """No: it holds a chain to the limits of one block."""
        return False

    @property
    def closeness(self) -> Closeness:
        """Its own ``rtol`` and ``atol``."""
        return Closeness(self.rtol, self.atol)

    def limits(self) -> dict[str, float]:
        """Return the limits by metric: a cosine distance for the cosine similarity."""
        return {
            "max_abs_diff": self.max_abs_diff,
            "mean_abs_diff": self.mean_abs_diff,
            "cosine_distance": round(1.0 - self.cosine_similarity, 12),
            "similarity_percentage": self.similarity_percentage,
            "pearson": self.pearson,
            **self.end_limits(),
        }

    def lacks(self, kind: Kind, metrics: Mapping[str, float]) -> bool:
        """Return False: every site has the plain metrics."""
        return False

    def breaches(self, kind: Kind, metrics: Mapping[str, float]) -> list[Breach]:
        """Return the broken limits; one that is NaN, or was not measured, is broken.

        Expert sets must all agree: a flip is not looked into here.
        """
        if kind is Kind.INDEX_SET:
            agreement = metrics.get("set_agreement", 0.0)
            return [Breach("set_agreement", agreement)] if agreement < 1.0 else []
        broken = []
        for name, limit in self.limits().items():
            value = metrics.get(name, math.nan)
            holds = value > limit if name in SIMILARITIES else value < limit
            if not holds and name not in self.end_limits():
                broken.append(Breach(name, metrics.get(name), limit))
        return broken + self.end_breaches(metrics)


Settings = FixedTolerance
