"""Judge: from a site's metrics to how it ends; stored rows can be judged again without tensors."""

from __future__ import annotations

from layerparity.compare.tolerances.base import Tolerance
from layerparity.site import Kind
from layerparity.verdict import Outcome

NO_REFERENCE = "nothing says how large its rounding may be"


def judge(
    kind: Kind, metrics: dict[str, float], tolerance: Tolerance, lacking: str = ""
) -> tuple[Outcome, str]:
    """Return how a site ends and why, given its metrics by name.

    ``lacking`` says why a tolerance may lack what it judges by: then the site is inconclusive.

    Exact sites and masks are judged by equality, NaN and Inf by agreement, whatever the tolerance.
    """
    if kind in (Kind.EXACT, Kind.MASK):
        broken = _apart(metrics["unequal"], "are not equal to the bit")
    else:
        disagreeing = metrics.get("nonfinite_disagreement", 0.0)
        broken = _apart(disagreeing, "are NaN or Inf on one side only")
        if not broken and tolerance.lacks(kind, metrics):
            return Outcome.INCONCLUSIVE, lacking or NO_REFERENCE
        broken = broken or tolerance.broken(kind, metrics)
    return (Outcome.FAIL, "; ".join(broken)) if broken else (Outcome.PASS, "")


def _apart(count: float, how: str) -> list[str]:
    return [f"{count:.0f} values {how}"] if count else []
