"""Align: for every site that was asked for, which two records meet there, or why none do.

A plan from manifests alone: no tensor is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import PREFILL, Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.fingerprints import differs_at
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.judge.stages import computed_at, is_feed, stage_of
from layerparity.record.manifest import Manifest, Record
from layerparity.record.site_patterns import SitePatterns
from layerparity.record.verdict import Outcome, Row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pair:
    """Two records of one site that are to be judged as ``kind``."""

    site: Site
    kind: Kind
    golden: SideRecord
    candidate: SideRecord

    def mask(self) -> torch.Tensor | None:
        """Return which tokens are real, bool [batch, token]; None for all.

        The golden's attention mask, else the candidate's. A decode step has no padding. Raises
        UserError where it cannot be read.
        """
        if self.site.phase != PREFILL:
            return None
        mask = self.golden.source.mask
        return self.candidate.source.mask if mask is None else mask


@dataclass(frozen=True)
class Alignment:
    """Every site that was asked for, once: as a pair to judge or as a row that is settled.

    Both stand in the order of a forward pass, which ``blocks`` know.
    """

    pairs: list[Pair]
    settled: list[Row]
    blocks: Blocks

    @property
    def total(self) -> int:
        """Number of sites that were asked for."""
        return len(self.pairs) + len(self.settled)


def align(golden: RunSet, candidate: RunSet, blocks: Blocks) -> Alignment:
    """Return what is compared with what.

    Asked for are the golden's sites within the candidate's stages, and whatever else the candidate
    captured or skipped. Raises UserError where no site can be compared.
    """
    pairs: list[Pair] = []
    settled: list[Row] = []
    refusals: list[str] = []
    stages = candidate.manifests
    covered = {site for site in golden.records if any(stage_of(each, site) for each in stages)}
    skipped = {Site.parse(text) for text in candidate.skipped()}
    for site in blocks.sorted(covered | set(candidate.records) | skipped):
        left, right = golden.records.get(site), candidate.records.get(site)
        if left is None or right is None:
            settled.append(_absent(site, golden, candidate))
            continue
        left, right = _adopt(left, right), _adopt(right, left)
        differing = differs_at(left, right, golden)
        refusals += [differing] if differing else []
        misfit = f"not the same start: {differing}" if differing else _misfit(left, right)
        if misfit:
            settled.append(Row(site, left.record.kind, Outcome.INCONCLUSIVE, note=misfit))
        else:
            pairs.append(Pair(site, _kind(left, right), left, right))
    shared = golden.records.keys() & candidate.records.keys()
    if not shared or (refusals and not pairs):
        raise UserError(_nothing(golden, candidate, refusals))
    return Alignment(pairs, settled, blocks)


def _absent(site: Site, golden: RunSet, candidate: RunSet) -> Row:
    """Return the row of a site that one side lacks."""
    left, right = golden.records.get(site), candidate.records.get(site)
    if right is not None:
        unrun = _unrun(site, golden)
        if unrun:
            return Row(site, right.record.kind, Outcome.INCONCLUSIVE, note=unrun)
        why = golden.skipped().get(str(site), "")
        reason = "not captured by the golden" + (f": {why}" if why else "")
        return Row(site, right.record.kind, Outcome.SKIPPED, note=reason)
    skipped = candidate.skipped().get(str(site))
    kind = left.record.kind if left else Kind.REAL
    if skipped is not None or left is None:
        return Row(site, kind, Outcome.SKIPPED, note=skipped or "not captured")
    reason = _not_asked(site, left.source.manifest, candidate.manifests)
    if reason:
        return Row(site, kind, Outcome.SKIPPED, note=reason)
    return Row(
        site, kind, Outcome.MISSING, note="the candidate covers it but holds no tensor of it"
    )


def _unrun(site: Site, golden: RunSet) -> str:
    """Return what the golden never ran of a site the candidate was asked for, or nothing.

    A site that only the candidate captured is no loss; a block or a step that has no golden is
    one, unless the golden is a dump, which is what somebody happened to have.
    """
    if not golden.proved:
        return ""
    covering = [each for each in golden.manifests if stage_of(each, site)]
    if not covering:
        return "the golden did not run this part of the model"
    return f"the golden ran no {site.phase} step {site.step}" if _no_step(site, covering) else ""


def _not_asked(site: Site, golden: Manifest, candidates: list[Manifest]) -> str:
    """Return why the candidate was never asked for a site within its stages, or nothing."""
    covering = [manifest for manifest in candidates if stage_of(manifest, site)]
    if _no_step(site, covering):
        return f"the candidate ran no {site.phase} step {site.step}"
    capture = covering[-1].numerics.get("capture", "") if covering else ""
    wanted = golden.numerics.get("capture", "")
    # Some run's own patterns may have wanted the site, whatever the golden's were.
    local = site.local if site.layer is not None else str(site)
    patterns = (SitePatterns.parse(each.numerics.get("capture", "")) for each in covering)
    asked = any(each is not None and each(layer=site.layer, local=local) for each in patterns)
    if capture == wanted or asked:
        return ""
    # Of "blocks: :in,:out" the name says enough, unless both have it.
    name = capture.partition(":")[0]
    return f"not captured by the candidate (capture={capture if wanted.startswith(name) else name})"


def _no_step(site: Site, covering: list[Manifest]) -> bool:
    """Say whether some runs hold records, and none of a site's step."""
    steps = {record.site.pass_step for each in covering for record in each.records}
    return bool(steps) and site.pass_step not in steps


def _adopt(own: SideRecord, other: SideRecord) -> SideRecord:
    """Return a dump's record with the axes and kind of the other side's run; a run's as it is.

    Of a dump only shape and dtype are known.
    """
    unlike = len(own.record.shape) != len(other.record.shape)
    if own.source.proved or not other.source.proved or unlike:
        return own
    record = replace(own.record, axes=other.record.axes, kind=other.record.kind)
    return SideRecord(own.source, record)


def _misfit(golden: SideRecord, candidate: SideRecord) -> str:
    """Return why two records of one site cannot be laid on each other, or nothing."""
    left, right = golden.record, candidate.record
    dtypes = {"golden": left.dtype, "candidate": right.dtype}
    whole = [side for side, dtype in dtypes.items() if "float" not in dtype]
    if whole and Kind.REAL in (left.kind, right.kind):
        sides = " and ".join(f"the {side} holds {dtypes[side]} numbers" for side in whole)
        return f"{sides} where real numbers are due: dump {'them' if whole[1:] else 'it'} as floats"
    if left.shape != right.shape:
        return _other_shape(left, right)
    if left.axes != right.axes:
        return f"axes ({', '.join(left.axes)}) against ({', '.join(right.axes)})"
    same = left.kind == right.kind
    return "" if same else f"{left.kind.value} numbers against {right.kind.value}"


def _other_shape(left: Record, right: Record) -> str:
    """Return the two shapes, and what the difference looks like."""
    shapes = f"shape {list(left.shape)} against {list(right.shape)}"
    small = _too_small("golden", left) or _too_small("candidate", right)
    if small:
        return f"{shapes}: {small}"
    if sorted(left.shape) == sorted(right.shape):
        return f"{shapes}: one is a transposed layout of the other"
    if len(left.shape) == len(right.shape):
        larger = [a >= b for a, b in zip(left.shape, right.shape, strict=True)]
        smaller = [a <= b for a, b in zip(left.shape, right.shape, strict=True)]
        if all(larger) or all(smaller):
            return f"{shapes}: one looks like the other padded"
    return shapes


def _too_small(side: str, record: Record) -> str:
    """Return that a tensor has next to no elements, or nothing."""
    count = prod(record.shape)
    if count > 1:
        return ""
    return f"the {side}'s tensor {'holds one element' if count else 'is empty'}"


def _kind(golden: SideRecord, candidate: SideRecord) -> Kind:
    """Return what the numbers of a site mean: a run's input that was fed or copied is exact."""
    if not candidate.source.proved or golden.record.kind is not Kind.REAL:
        return golden.record.kind
    manifest, site = candidate.source.manifest, candidate.record.site
    # What a block takes from the embedding is copied rows, like the embedding's own output.
    exact = is_feed(manifest, site) or computed_at(manifest, site).path == "embed_tokens"
    return Kind.EXACT if exact else Kind.REAL


def _nothing(golden: RunSet, candidate: RunSet, refusals: list[str]) -> str:
    """Return the message of two sides of which no site can be compared."""
    names = f"'{golden.sources[0].run.name}' and '{candidate.sources[0].run.name}'"
    if not refusals:
        return f"{names} share no site: give runs whose scopes overlap."
    texts = list(dict.fromkeys(refusals))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return (
        f"No site of {names} can be compared, these differ: {'; '.join(texts[:3])}{more}. "
        "Make both from the same weights and inputs."
    )
