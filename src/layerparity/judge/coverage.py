"""Coverage: what a set of judged sites is evidence of, for a block and for the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import DECODE, EMBEDDING, HEAD, NORM, PREFILL, TOKENS, Site
from layerparity.record.verdict import DECIDED, Outcome, Row, WholeModel

_OPEN = (Outcome.INCONCLUSIVE, Outcome.MISSING)
_ENDS = (EMBEDDING, NORM, HEAD)
BLOCK_ALONE = "block output alone cannot show a bug inside; use capture=default"


def doubt_block_outputs(rows: Sequence[Row], blocks: Blocks) -> list[Row]:
    """Return the rows, with a passed block output inconclusive where nothing inside was judged.

    The residual stream drowns what happens inside a block: its output alone is never a pass. What
    a block adds to the stream shows it.
    """
    inside = {
        (row.site.layer, row.site.pass_step)
        for row in rows
        if row.outcome in DECIDED and _is_branch(row.site, blocks)
    }
    return [
        replace(row, outcome=Outcome.INCONCLUSIVE, note=BLOCK_ALONE)
        if row.outcome is Outcome.PASS
        and _is_block_output(row.site)
        and (row.site.layer, row.site.pass_step) not in inside
        else row
        for row in rows
    ]


def whole_model(rows: Sequence[Row], num_layers: int, unseen: Sequence[str] = ()) -> WholeModel:
    """Return the verdict on the whole model: how much of it was judged, and how that ended.

    A block counts as compared where its output was judged, else it was compared in part. A phase
    of which no step was judged leaves it inconclusive. ``unseen`` are the classes of layers of
    which no block was compared.
    """
    judged = [row for row in rows if row.outcome in DECIDED]
    touched = {row.site.layer for row in judged} - {None}
    compared = {row.site.layer for row in judged if _is_block_output(row.site)}
    parts = {row.site.component for row in judged if row.site.layer is None}
    absent = tuple(name for name in _ENDS if name not in parts)
    unrun = tuple(unexercised(rows))
    whole = len(compared) >= num_layers and not absent and not unrun
    if any(row.outcome is Outcome.FAIL for row in rows):
        outcome = Outcome.FAIL
    elif whole and not any(row.outcome in _OPEN for row in rows):
        outcome = Outcome.PASS
    else:
        outcome = Outcome.INCONCLUSIVE
    in_part = len(touched - compared)
    return WholeModel(outcome, num_layers, len(compared), in_part, absent, unrun, tuple(unseen))


def steps_of(sites: Iterable[Site]) -> dict[str, set[int]]:
    """Return the steps that some sites are of, by phase, the prefill first.

    A chosen token is no step: it is made of the step before it.
    """
    found: dict[str, set[int]] = {}
    for site in sites:
        if site.path != TOKENS:
            found.setdefault(site.phase, set()).add(site.step)
    return {phase: found[phase] for phase in (PREFILL, DECODE) if phase in found}


def unexercised(rows: Iterable[Row]) -> list[str]:
    """Return the phases that were asked for, and of which nothing that was computed was judged."""
    kept = list(rows)
    judged = steps_of(r.site for r in kept if r.outcome in DECIDED and r.site.end != "in")
    return [phase for phase in steps_of(row.site for row in kept) if phase not in judged]


def _is_block_output(site: Site) -> bool:
    return site.layer is not None and site.component == "" and site.end == "out"


def _is_branch(site: Site, blocks: Blocks) -> bool:
    return site.end == "out" and site.component in blocks.block(site.layer).branches
