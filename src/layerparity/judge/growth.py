"""Growth: which block of a chained run goes wrong first, against how clean rounding accumulates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from layerparity.anatomy.site import PREFILL, Site
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.record.weights import WeightFinding

FACTOR = 4.0
# A mistake that makes a smaller relative error than this is left to a comparison of blocks alone:
# where the growth of rounding explains more, it cannot tell.
WIDE = 0.01
# A clean block's relative error in units of its dtype's rounding step, where no floor was measured:
# bfloat16 3e-3, float32 5e-7 on small models.
_STEPS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-23, "float64": 2**-52}
_ROUNDINGS = 4.0
_UNJUDGED = (Outcome.MISSING, Outcome.SKIPPED)

Rows = Mapping[Site, Row]


@dataclass(frozen=True)
class Untold:
    """Why a chain cannot tell whether a block is right.

    ``row`` is the site that leaves it open, None where none of `watched_sites` was compared;
    ``allowed`` is what rounding alone may have grown to there, relative L2, 0 where it was not
    judged.
    """

    layer: int
    row: Row | None = None
    allowed: float = 0.0


@dataclass(frozen=True)
class ChainJudgement:
    """The first wrong block of a chain, or its worst site where none is: error and what is allowed.

    Errors are relative L2; ``allowed`` is what clean rounding may have grown to. Where a site
    fails by itself, or weights differ, ``failed`` or ``findings`` are what made it wrong.
    ``untold`` are the blocks about which the chain cannot tell, empty where it is wrong.
    """

    wrong: bool
    site: Site | None = None
    error: float = 0.0
    allowed: float = 0.0
    layer: int | None = None
    failed: Row | None = None
    findings: tuple[WeightFinding, ...] = ()
    untold: tuple[Untold, ...] = ()


def watched_sites(verdict: Verdict, layer: int) -> tuple[Site, ...]:
    """Return where a bug can be seen: what a block adds to the residual stream, and its output."""
    branches = verdict.blocks.block(layer).branches
    return tuple(Site.inside(layer, f"{module}:out") for module in (*branches, ""))


def judge_chained(
    verdict: Verdict, last: int, first: int, factor: float = FACTOR
) -> ChainJudgement:
    """Judge blocks ``first..last`` of a candidate that is chained from block ``first`` on.

    The first block counts in which one of three is seen: a weight that differs; a site that fails
    against what clean chains from the same start become; or, at one of `watched_sites`, an error
    that is more than ``factor`` times what rounding has grown to, see `_grown`. The error is the
    median over real tokens of the relative L2 (a token whose experts flipped does not decide); NaN
    is wrong. Later blocks are fed something wrong, and may hide it: each block is judged by itself.
    """
    rows = {row.site: row for row in verdict.rows}
    worst = ChainJudgement(wrong=False)
    untold: list[Untold] = []
    for layer in range(first, last + 1):
        faults = tuple(each for each in verdict.weights if each.is_fault and each.layer == layer)
        if faults:
            return ChainJudgement(True, layer=layer, findings=faults)
        judged = _by_rows(verdict, layer) or _by_growth(verdict, rows, layer, first, factor)
        if judged.wrong:
            return judged
        worst = max(worst, judged, key=_ratio)
        open_ = _untold(verdict, rows, layer, first, factor)
        untold += [open_] if open_ else []
    return replace(worst, untold=tuple(untold))


def _by_rows(verdict: Verdict, layer: int) -> ChainJudgement | None:
    """Return the first site of a block that fails against clean chains, or tokens routed apart."""
    if not verdict.knows_chains:
        return None
    for row in verdict.rows:
        prefill = row.site.phase == PREFILL and row.site.end != "in"
        if row.site.layer == layer and prefill and row.outcome is Outcome.FAIL:
            return ChainJudgement(True, row.site, layer=layer, failed=row)
    return None


def _by_growth(
    verdict: Verdict, rows: Rows, layer: int, first: int, factor: float
) -> ChainJudgement:
    """Return how a block's worst watched site stands against the growth of rounding."""
    worst = ChainJudgement(wrong=False)
    for site in watched_sites(verdict, layer):
        errors = verdict.token_errors.get(str(site))
        if not errors or site not in rows or rows[site].outcome in _UNJUDGED:
            continue
        error = statistics.median(errors)
        allowed = factor * _grown(verdict, rows, site, first)
        judged = ChainJudgement(not error <= allowed, site, error, allowed, layer)
        worst = max(worst, judged, key=_ratio)
    return worst


def _grown(verdict: Verdict, rows: Rows, site: Site, first: int) -> float:
    """Return the relative L2 error that clean rounding of a chain has at a site of a block.

    The metric ``floor_rel_l2`` of a row is what clean chains show there, the blocks before it
    included. Past the last row that has one, independent rounding errors of the blocks passed add
    up in squares: ``sqrt(floor_j^2 + (layer - j) * a few rounding steps^2)``, the steps those of
    the coarser dtype.
    """
    layer = site.layer or 0
    passed = 0
    for each in range(layer, first - 1, -1):
        row = rows.get(Site.inside(each, site.local))
        measured = row.metrics.get("floor_rel_l2") if row else None
        if measured:
            return math.hypot(measured, math.sqrt(passed) * _step(verdict))
        passed += 1
    return math.sqrt(passed) * _step(verdict)


def _untold(verdict: Verdict, rows: Rows, layer: int, first: int, factor: float) -> Untold | None:
    """Return why a chain cannot tell whether a block is right; None where it can.

    It can where every watched site passes by a measured floor, or by a narrow growth.
    """
    seen = 0
    for site in watched_sites(verdict, layer):
        row = rows.get(site)
        if row is None or row.outcome is Outcome.SKIPPED:
            continue
        seen += 1
        if row.outcome is Outcome.PASS:
            continue
        if row.outcome is Outcome.MISSING or not verdict.token_errors.get(str(site)):
            return Untold(layer, row)
        allowed = factor * _grown(verdict, rows, site, first)
        if allowed > WIDE:
            return Untold(layer, row, allowed)
    return None if seen else Untold(layer)


def _ratio(judged: ChainJudgement) -> float:
    if judged.site is None:
        return -1.0
    if math.isnan(judged.error):
        return math.inf
    return judged.error / judged.allowed if judged.allowed else math.inf


def _step(verdict: Verdict) -> float:
    dtypes = (*verdict.golden.dtypes, *verdict.candidate.dtypes)
    return _ROUNDINGS * max(_STEPS.get(dtype, _STEPS["float32"]) for dtype in dtypes)
