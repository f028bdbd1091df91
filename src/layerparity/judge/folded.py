"""Folded: a value that is the golden's times a constant, which what reads it undoes.

Queries may carry the scale of attention, which it then does not apply: what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerparity.anatomy.block import RESIDUAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.judge.align import Alignment, Pair
from layerparity.judge.evaluate import load
from layerparity.judge.rows import by_token, has_tokens, real_tokens
from layerparity.mistakes.values import best_factor
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Outcome, Row

# What is left of a multiple, over rounding: it was rounded once more.
_LEFT = 2.0
# How far from 1 a factor is that what reads the value could not but show. A bug may scale by less.
_FAR = 0.25


def with_folded_scales(rows: Sequence[Row], aligned: Alignment) -> list[Row]:
    """Return the rows, with those skipped that are a multiple of the golden's and do no harm.

    So it is where all that the block computes from such a value are numbers that pass: choices are
    the same whatever their scores are multiplied by. A skipped row keeps no numbers: another
    tolerance has nothing to judge there either.
    """
    pairs = {pair.site: pair for pair in aligned.pairs}
    right = {r.site for r in rows if r.kind is Kind.REAL and r.outcome is Outcome.PASS}
    kept = list(rows)
    for index, row in enumerate(rows):
        if row.outcome is not Outcome.FAIL or row.kind is not Kind.REAL or row.site not in pairs:
            continue
        readers = _readers(row.site, aligned.blocks)
        if not readers or not right.issuperset(readers):
            continue
        factor = _factor(pairs[row.site], row)
        if factor is not None:
            values = {"factor": factor, "site": str(readers[0])}
            why = Reason(ReasonKind.FOLDED, values)
            kept[index] = replace(
                row, outcome=Outcome.SKIPPED, breaches=(), why=why, metrics={}, lacking=None
            )
    return kept


def _readers(site: Site, blocks: Blocks) -> list[Site]:
    """Return what a block computes from a value of its own, in the same pass."""
    if site.layer is None or not site.component:
        return []
    readers = [node for node in blocks.block(site.layer).nodes if site.local in node.inputs]
    if any(node.part == RESIDUAL for node in readers):
        # A sum is little changed by one of its terms: that it passes vouches for nothing.
        return []
    return [Site.inside(site.layer, node.local, *site.pass_step) for node in readers]


def _factor(pair: Pair, row: Row) -> float | None:
    """Return the factor of a candidate that is a multiple of the golden but for rounding."""
    floor, axes = row.metrics.get("floor_rel_l2"), pair.golden.record.axes
    if not floor or not has_tokens(axes):
        return None
    left, right = pair.cut(load(pair.golden)).double(), load(pair.candidate).double()
    if left.shape != right.shape:
        return None
    views = [by_token(each, axes) for each in (left, right)]
    real = real_tokens(views[0], pair.mask())
    ours, theirs = (view[real] for view in views)
    factor = best_factor(ours, theirs)
    off = (theirs / factor - ours).norm() if factor else ours.norm()
    alike = bool(off <= _LEFT * floor * ours.norm())
    return factor if alike and abs(factor - 1) > _FAR else None
