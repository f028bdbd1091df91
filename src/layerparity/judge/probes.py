"""Probes: whether a run observed its sites where and when it says, told from hashes alone.

Tensors of some size are not equal to the bit by chance. Where a run shows the same one in two
layers, or in two decode steps, its port observed one tensor twice, or one result served for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import DECODE, Kind, Site
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.judge.stages import stage_of
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.manifest import Record

# Two routing weights of one token may well be the same in two layers; so many numbers may not.
_LEAST = 16

Pairs = Iterator[tuple[Site, Site]]


def probe_cautions(golden: RunSet, candidate: RunSet, blocks: Blocks) -> list[Caution]:
    """Return what either side shows twice, and the other side does not.

    A model may compute one thing for several layers, or the same at each step: then both sides show
    it. What a block adds to the residual stream is never the same: that both show it twice is said
    as well, unless the golden's blocks were measured, and so its sites are known to be its own.
    """
    trusted = all(manifest.blocks for manifest in golden.manifests)
    found = []
    for side, own, other in (("golden", golden, candidate), ("candidate", candidate, golden)):
        if side == "golden" and trusted:
            continue
        for kind, repeats in (
            (CautionKind.REPEATED_TENSOR, _layers),
            (CautionKind.UNCHANGED_STEP, _steps),
        ):
            shown = repeats(own, blocks)
            pairs = [p for p in shown if _differs(other, p) or (not trusted and _adds(p, blocks))]
            if pairs:
                first, second = pairs[0]
                count = len({site for _, site in pairs})
                values = {"site": str(second), "other": str(first), "count": count}
                found.append(Caution(kind, side, values))
    return found


def _differs(other: RunSet, pair: tuple[Site, Site]) -> bool:
    """Say whether the other side holds two tensors there."""
    first, second = (other.records.get(site) for site in pair)
    if first is None or second is None:
        return False
    return first.record.digest != second.record.digest


def _adds(pair: tuple[Site, Site], blocks: Blocks) -> bool:
    """Say whether sites are of what blocks add to the residual stream."""
    return all(s.end == "out" and s.component in blocks.block(s.layer).branches for s in pair)


def _layers(side: RunSet, blocks: Blocks) -> Pairs:
    """Yield sites that hold the same tensor as an earlier layer does, which comes first."""
    held: dict[tuple[object, ...], Site] = {}
    for site in blocks.sorted(side.records):
        record = side.records[site].record
        if site.layer is not None and _tells(record):
            own = (record.digest, record.dtype, record.shape)
            first = held.setdefault((site.local, site.pass_step, *own), site)
            if first != site:
                yield first, site


def _steps(side: RunSet, blocks: Blocks) -> Pairs:
    """Yield sites that hold the same tensor in two decode steps, of which the block was fed others.

    What does not depend on a token's place is the same for the same token.
    """
    before: dict[tuple[str, str], Site] = {}
    for site in blocks.sorted(site for site in side.records if site.phase == DECODE):
        early = before.get((site.path, site.end))
        before[site.path, site.end] = site
        if early is None:
            continue
        first, second = side.records[early], side.records[site]
        same = first.record.digest == second.record.digest
        if same and _tells(second.record) and _fed(first) != _fed(second):
            yield early, site


def _fed(own: SideRecord) -> str:
    """Return the hash of what a record's stage was fed at its step; empty where it is not known."""
    manifest, site = own.source.manifest, own.record.site
    stage = stage_of(manifest, site)
    fed = (f for f in manifest.feeds if f.stage == stage and f.site.pass_step == site.pass_step)
    return next((each.digest for each in fed), "")


def _tells(record: Record) -> bool:
    """Say whether no other tensor could equal this one by chance."""
    stats = record.stats
    varied = stats.get("max", 1.0) > stats.get("min", 0.0)
    finite = not stats.get("nan") and not stats.get("inf")
    real = record.kind is Kind.REAL and prod(record.shape) >= _LEAST
    return bool(record.digest) and real and varied and finite
