"""No residual: a dump whose blocks' outputs are what each block adds, without what it adds it to.

An engine may return a pair, what was computed and the residual stream so far, and add them later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Site
from layerparity.judge.evaluate import load
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Outcome, Row

# Relative L2 distance of what is the same but for rounding; a residual stream is far from it.
_SAME = 0.05


def without_residual(
    rows: Sequence[Row], golden: RunSet, candidate: RunSet, blocks: Blocks
) -> list[Row]:
    """Return the rows, inconclusive where a dump's map names what blocks add as their outputs.

    So it is where no block's output passes, and the first one is what the golden's first block adds
    last. What was fed such outputs is inconclusive with them.
    """
    ends = [row for row in rows if row.site.local == ":out" and row.metrics]
    elsewhere = all(not each.proved or each.manifest.elsewhere for each in candidate.sources)
    failing = all(row.outcome is Outcome.FAIL for row in ends)
    if not elsewhere or len(ends) < 2 or not failing:
        return list(rows)
    added = _added(candidate, golden, blocks)
    if added is None:
        return list(rows)
    own = any(manifest.values_of for manifest in golden.manifests)
    why = Reason(ReasonKind.NO_RESIDUAL, {"site": added})
    return [
        replace(row, outcome=Outcome.INCONCLUSIVE, breaches=(), why=why)
        if row.outcome is Outcome.FAIL and _follows(row.site, own)
        else row
        for row in rows
    ]


def _follows(site: Site, own: bool) -> bool:
    """Say whether a site is a block's end, or was computed from one: on the candidate's own values.

    What the first block computes before its end was fed the embedding.
    """
    if site.local in (":in", ":out"):
        return True
    return own and site.layer != 0 and not site.path.startswith("embed_tokens")


def _added(candidate: RunSet, golden: RunSet, blocks: Blocks) -> str | None:
    """Return what the first block's output is, of what the golden's block adds last; or None."""
    branches = blocks.block(0).branches
    if not branches:
        return None
    last = Site.inside(0, f"{branches[-1]}:out")
    sides = candidate.records.get(Site.inside(0, ":out")), golden.records.get(last)
    return str(last) if None not in sides and _same(*sides) else None


def _same(left: SideRecord | None, right: SideRecord | None) -> bool:
    """Say whether two floating tensors of one size hold the same but for rounding."""
    assert left is not None and right is not None
    ours, theirs = (load(each).double().flatten() for each in (left, right))
    if ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).norm() <= _SAME * theirs.norm())
