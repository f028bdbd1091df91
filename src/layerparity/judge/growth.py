"""Growth: which block of a chained run goes wrong first, against how clean rounding accumulates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from layerparity.anatomy.site import PREFILL, Site
from layerparity.judge.guilt import findings_in, names_of
from layerparity.record.comparison import Comparison
from layerparity.record.verdict import Outcome, Row

# Where a bug can be seen: what a block adds to the residual stream, and its output.
WATCHED = ("self_attn:out", "mlp:out", ":out")
FACTOR = 4.0
# A mistake that makes a smaller relative error than this is left to a comparison of blocks alone:
# where the growth of rounding explains more, it cannot tell.
WIDE = 0.01
# Fixed limits know nothing of a chain: a right one exceeds them.
_KNOWS_CHAINS = "calibrated"
# A clean block's relative error in units of its dtype's rounding step, where no floor was measured:
# bfloat16 3e-3, float32 5e-7 on small models.
_STEPS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-23, "float64": 2**-52}
_ROUNDINGS = 4.0
_UNJUDGED = (Outcome.MISSING, Outcome.SKIPPED)

Rows = Mapping[Site, Row]


@dataclass(frozen=True)
class Judged:
    """The first wrong block of a chain, or its worst site where none is: error and what is allowed.

    Errors are relative L2; ``allowed`` is what clean rounding may have grown to. ``reason`` is what
    else made it wrong. ``untold`` are the blocks about which the chain cannot tell, ``why`` the
    reason of the first of them; both are empty where it is wrong.
    """

    wrong: bool
    site: str = ""
    error: float = 0.0
    allowed: float = 0.0
    layer: int | None = None
    reason: str = ""
    untold: tuple[int, ...] = ()
    why: str = ""

    @property
    def text(self) -> str:
        """The judgement in a few words."""
        if self.reason:
            return self.reason
        if not self.site:
            return "nothing to judge"
        how = "more" if self.wrong else "no more"
        return f"{self.site} is off by {self.error:.2g}, {how} than rounding's {self.allowed:.2g}"

    @property
    def doubt(self) -> str:
        """What a chain that is not wrong leaves open, in a sentence; empty where it is nothing."""
        if not self.untold:
            return ""
        more = f" and {len(self.untold) - 1} more" if len(self.untold) > 1 else ""
        return f"the chained run cannot tell about layers.{self.untold[0]}{more}: {self.why}"


def judge_chained(comparison: Comparison, last: int, first: int, factor: float = FACTOR) -> Judged:
    """Judge blocks ``first..last`` of a candidate that is chained from block ``first`` on.

    The first block counts in which one of three is seen: a weight that differs; a site that fails
    against what clean chains from the same start become; or, at one of `WATCHED`, an error that is
    more than ``factor`` times what rounding has grown to, see `_grown`. The error is the median
    over real tokens of the relative L2 (a token whose experts flipped does not decide); NaN is
    wrong. Later blocks are fed something wrong, and may hide it: each block is judged by itself.
    """
    rows = {row.site: row for row in comparison.rows}
    worst = Judged(wrong=False)
    untold: list[int] = []
    why = ""
    for layer in range(first, last + 1):
        grown = _by_growth(comparison, rows, layer, first, factor)
        found = _by_weights(comparison, layer) or _by_rows(comparison, layer) or grown
        if found.wrong:
            return found
        worst = max(worst, found, key=_ratio)
        open_ = _untold(comparison, rows, layer, first, factor)
        if open_:
            untold.append(layer)
            why = why or open_
    return Judged(
        False, worst.site, worst.error, worst.allowed, worst.layer, untold=tuple(untold), why=why
    )


def _by_weights(comparison: Comparison, layer: int) -> Judged | None:
    findings = findings_in(comparison, layer)
    if not findings:
        return None
    reason = f"weights of layers.{layer} differ: {names_of(findings)}"
    return Judged(True, layer=layer, reason=reason)


def _by_rows(comparison: Comparison, layer: int) -> Judged | None:
    """Return the first site of a block that fails against clean chains, or tokens routed apart."""
    if comparison.tolerance != _KNOWS_CHAINS:
        return None
    for row in comparison.rows:
        prefill = row.site.phase == PREFILL and row.site.end != "in"
        if row.site.layer == layer and prefill and row.outcome is Outcome.FAIL:
            return Judged(
                True, str(row.site), layer=layer, reason=f"{row.site} fails: {row.reason}"
            )
    return None


def _by_growth(comparison: Comparison, rows: Rows, layer: int, first: int, factor: float) -> Judged:
    """Return how a block's worst watched site stands against the growth of rounding."""
    worst = Judged(wrong=False)
    for local in WATCHED:
        site = _at(layer, local)
        errors = comparison.token_errors.get(str(site))
        if not errors or site not in rows or rows[site].outcome in _UNJUDGED:
            continue
        error = statistics.median(errors)
        allowed = factor * _grown(comparison, rows, layer, first, local)
        found = Judged(not error <= allowed, str(site), error, allowed, layer)
        worst = max(worst, found, key=_ratio)
    return worst


def _grown(comparison: Comparison, rows: Rows, layer: int, first: int, local: str) -> float:
    """Return the relative L2 error that clean rounding of a chain has at a site of block ``layer``.

    The metric ``floor_rel_l2`` of a row is what clean chains show there, the blocks before it
    included. Past the last row that has one, independent rounding errors of the blocks passed add
    up in squares: ``sqrt(floor_j^2 + (layer - j) * a few rounding steps^2)``, the steps those of
    the coarser dtype.
    """
    passed = 0
    for each in range(layer, first - 1, -1):
        row = rows.get(_at(each, local))
        measured = row.metrics.get("floor_rel_l2") if row else None
        if measured:
            return math.hypot(measured, math.sqrt(passed) * _step(comparison))
        passed += 1
    return math.sqrt(passed) * _step(comparison)


def _untold(comparison: Comparison, rows: Rows, layer: int, first: int, factor: float) -> str:
    """Return why a chain cannot tell whether a block is right; empty where it can.

    It can where every watched site passes by a measured floor, or by a narrow growth.
    """
    seen = 0
    for local in WATCHED:
        site = _at(layer, local)
        row = rows.get(site)
        if row is None or row.outcome is Outcome.SKIPPED:
            continue
        seen += 1
        if row.outcome is Outcome.PASS:
            continue
        if row.outcome is Outcome.MISSING or not comparison.token_errors.get(str(site)):
            return f"{site} was not judged ({row.reason})" if row.reason else f"{site} is missing"
        allowed = factor * _grown(comparison, rows, layer, first, local)
        if allowed > WIDE:
            reason = f" ({row.reason})" if row.reason else ""
            return (
                f"rounding alone may have grown to {allowed:.2g} of {site}, and a mistake could "
                f"hide in that{reason}"
            )
    return "" if seen else f"none of {', '.join(WATCHED)} was compared"


def _ratio(judged: Judged) -> float:
    if not judged.site:
        return -1.0
    if math.isnan(judged.error):
        return math.inf
    return judged.error / judged.allowed if judged.allowed else math.inf


def _step(comparison: Comparison) -> float:
    dtypes = f"{comparison.golden.dtype}, {comparison.candidate.dtype}".split(", ")
    return _ROUNDINGS * max(_STEPS.get(dtype, _STEPS["float32"]) for dtype in dtypes)


def _at(layer: int, local: str) -> Site:
    path, _, end = local.partition(":")
    block = f"layers.{layer}"
    return Site(f"{block}.{path}" if path else block, end, PREFILL)
