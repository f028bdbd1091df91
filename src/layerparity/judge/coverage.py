"""Coverage: what a set of judged sites is evidence of, for a block and for the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from layerparity.anatomy.site import DECODE, PREFILL, Site
from layerparity.record.verdict import Outcome, Row

_JUDGED = (Outcome.PASS, Outcome.FAIL)
_OPEN = (Outcome.INCONCLUSIVE, Outcome.MISSING)
# What a block adds to the residual stream, before it drowns there.
_EVIDENCE = ("self_attn:out", "mlp:out")
_ENDS = ("embed_tokens", "norm", "lm_head")
_TOKENS = "tokens"
BLOCK_ALONE = "block output alone cannot show a bug inside; use capture=default"


def doubt_block_outputs(rows: list[Row]) -> list[Row]:
    """Return the rows, with a passed block output inconclusive where nothing inside was judged.

    The residual stream drowns what happens inside a block: its output alone is never a pass.
    """
    inside = {
        (row.site.layer, row.site.phase, row.site.step)
        for row in rows
        if row.outcome in _JUDGED and row.site.local in _EVIDENCE
    }
    return [_doubted(row) if _alone(row, inside) else row for row in rows]


def whole_model(rows: list[Row], num_layers: int) -> str:
    """Return the verdict on the whole model: how much of it was judged, and how that ended.

    A block counts as compared where its output was judged, else it was compared in part. A phase
    of which no step was judged leaves it inconclusive.
    """
    judged = [row for row in rows if row.outcome in _JUDGED]
    touched = {row.site.layer for row in judged} - {None}
    blocks = {row.site.layer for row in judged if _is_block_output(row.site)}
    parts = {row.site.component for row in judged if row.site.layer is None}
    absent = [name for name in _ENDS if name not in parts]
    unrun = unexercised(rows)
    if any(row.outcome is Outcome.FAIL for row in rows):
        outcome = "fail"
    elif absent or len(blocks) < num_layers or any(row.outcome in _OPEN for row in rows) or unrun:
        outcome = "inconclusive"
    else:
        return "whole model: pass"
    compared = f"{len(blocks)} of {num_layers} blocks compared"
    in_part = f", {len(touched - blocks)} in part" if touched - blocks else ""
    without = f", without {', '.join(absent)}" if absent else ""
    never = f", {' and '.join(unrun)} never exercised" if unrun else ""
    return f"whole model: {outcome}, {compared}{in_part}{without}{never}"


def steps_of(sites: Iterable[Site]) -> dict[str, set[int]]:
    """Return the steps that some sites are of, by phase, the prefill first.

    A chosen token is no step: it is made of the step before it.
    """
    found: dict[str, set[int]] = {}
    for site in sites:
        if site.path != _TOKENS:
            found.setdefault(site.phase, set()).add(site.step)
    return {phase: found[phase] for phase in (PREFILL, DECODE) if phase in found}


def unexercised(rows: Iterable[Row]) -> list[str]:
    """Return the phases that were asked for, and of which nothing that was computed was judged."""
    kept = list(rows)
    judged = steps_of(r.site for r in kept if r.outcome in _JUDGED and r.site.end != "in")
    return [phase for phase in steps_of(row.site for row in kept) if phase not in judged]


def _is_block_output(site: Site) -> bool:
    return site.layer is not None and site.component == "" and site.end == "out"


def _alone(row: Row, inside: set[tuple[int | None, str, int]]) -> bool:
    passed = _is_block_output(row.site) and row.outcome is Outcome.PASS
    return passed and (row.site.layer, row.site.phase, row.site.step) not in inside


def _doubted(row: Row) -> Row:
    return replace(row, outcome=Outcome.INCONCLUSIVE, reason=BLOCK_ALONE)
