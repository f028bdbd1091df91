"""The seeds' table: one fixed limit for each metric, the same at every site and for every dtype."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.anatomy.site import Kind
from layerparity.settings.key import key

_CEILINGS = ("max_abs_diff", "mean_abs_diff", "cosine_distance")


@dataclass
class FixedTolerance:
    """A value must be under a ceiling (the differences) or over a floor (the similarities).

    It cries wolf over bfloat16's rounding and misses small slips; it is what people know.
    """

    name: str = "fixed"
    max_abs_diff: float = key(0.01, "largest difference of any element, below")
    mean_abs_diff: float = key(0.001, "mean difference, below")
    similarity_percentage: float = key(95.0, "percentage of similar elements, above")
    cosine_similarity: float = key(0.99, "cosine of both tensors, above")
    pearson: float = key(0.99, "correlation of both tensors, above")

    def limits(self) -> dict[str, float]:
        """Return the limits by metric: a cosine distance for the cosine similarity."""
        return {
            "max_abs_diff": self.max_abs_diff,
            "mean_abs_diff": self.mean_abs_diff,
            "cosine_distance": round(1.0 - self.cosine_similarity, 12),
            "similarity_percentage": self.similarity_percentage,
            "pearson": self.pearson,
        }

    def lacks(self, kind: Kind, metrics: dict[str, float]) -> bool:
        """Return False: every site has the plain metrics."""
        return False

    def broken(self, kind: Kind, metrics: dict[str, float]) -> list[str]:
        """Return the broken limits; one that is NaN, or was not measured, is broken.

        Expert sets must all agree: a flip is not looked into here.
        """
        if kind is Kind.INDEX_SET:
            apart = 1.0 - metrics.get("set_agreement", 0.0)
            return [f"expert sets differ at {apart:.2%} of the tokens"] if apart else []
        limits = self.limits().items()
        texts = (_broken(key, metrics.get(key, float("nan")), limit) for key, limit in limits)
        return [text for text in texts if text]


def _broken(key: str, value: float, limit: float) -> str:
    if key in _CEILINGS:
        if value < limit:
            return ""
        times = f", {value / limit:.1f} times it" if limit else ""
        return f"{key} {value:.4g} is not under {limit:g}{times}"
    if value > limit:
        return ""
    return f"{key} {value:.6g} is not over {limit:g}, {limit - value:.3g} short of it"


Settings = FixedTolerance
