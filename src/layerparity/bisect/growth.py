"""Growth: whether a block of a chained run is wrong, against how clean rounding accumulates."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from layerparity.compare.comparison import Comparison
from layerparity.site import PREFILL, Site
from layerparity.verdict import Outcome, Row

# Where a bug can be seen: what a block adds to the residual stream, and its output.
WATCHED = ("self_attn:out", "mlp:out", ":out")
FACTOR = 4.0
# A clean block's relative error in units of its dtype's rounding step, where no floor was measured:
# bfloat16 3e-3, float32 5e-7 on small models.
_STEPS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-23, "float64": 2**-52}
_ROUNDINGS = 4.0


@dataclass(frozen=True)
class Judged:
    """A chained block's worst site: its error, what clean rounding may have grown to, the ratio.

    Errors are relative L2. ``wrong`` says whether the error is more than rounding explains.
    """

    wrong: bool
    site: str = ""
    error: float = 0.0
    allowed: float = 0.0

    @property
    def text(self) -> str:
        """The judgement in a few words."""
        if not self.site:
            return "nothing to judge"
        how = "more" if self.wrong else "no more"
        return f"{self.site} is off by {self.error:.2g}, {how} than rounding's {self.allowed:.2g}"


def judge_chained(comparison: Comparison, layer: int, first: int, factor: float = FACTOR) -> Judged:
    """Judge block ``layer`` of a candidate that is chained from block ``first`` on.

    At each of `WATCHED`, the median over real tokens of the relative L2 error (a token whose
    experts flipped does not decide) is held against
    ``factor * sqrt(sum of floor_j^2 for j = first..layer)``: independent rounding errors of the
    blocks passed add up in squares. ``floor_j`` is the local floor of the same site in block j, the
    metric ``floor_rel_l2`` of its row; where none was measured, a few rounding steps of the
    coarser dtype. A NaN or Inf, or a site that fails by them, is wrong. The worst site counts.
    """
    rows = {row.site: row for row in comparison.rows}
    worst = Judged(wrong=False)
    for local in WATCHED:
        site = _at(layer, local)
        errors = comparison.token_errors.get(str(site))
        if not errors or site not in rows or rows[site].outcome in _UNJUDGED:
            continue
        error = statistics.median(errors)
        floors = [_floor(comparison, rows.get(_at(j, local))) for j in range(first, layer + 1)]
        allowed = factor * math.sqrt(sum(floor * floor for floor in floors))
        found = Judged(not error <= allowed, str(site), error, allowed)
        worst = max(worst, found, key=_ratio)
    return worst


_UNJUDGED = (Outcome.MISSING, Outcome.SKIPPED)


def _ratio(judged: Judged) -> float:
    if not judged.site:
        return -1.0
    if math.isnan(judged.error):
        return math.inf
    return judged.error / judged.allowed if judged.allowed else math.inf


def _floor(comparison: Comparison, row: Row | None) -> float:
    measured = row.metrics.get("floor_rel_l2") if row else None
    if measured:
        return measured
    dtypes = f"{comparison.golden.dtype}, {comparison.candidate.dtype}".split(", ")
    return _ROUNDINGS * max(_STEPS.get(dtype, _STEPS["float32"]) for dtype in dtypes)


def _at(layer: int, local: str) -> Site:
    path, _, end = local.partition(":")
    block = f"layers.{layer}"
    return Site(f"{block}.{path}" if path else block, end, PREFILL)
