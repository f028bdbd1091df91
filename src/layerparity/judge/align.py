"""Align: for every site that was asked for, which two records meet there, or why none do.

A plan from manifests alone: no tensor is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.fingerprints import differs_at
from layerparity.judge.sides import Found, RunSet
from layerparity.judge.stages import arrived, is_feed, stage_of
from layerparity.record.manifest import Manifest, Record
from layerparity.record.verdict import Outcome, Row


@dataclass(frozen=True)
class Pair:
    """Two records of one site that are to be judged as ``kind``."""

    site: Site
    kind: Kind
    golden: Found
    candidate: Found


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
    for site in blocks.sorted(_asked(golden, candidate)):
        left, right = golden.records.get(site), candidate.records.get(site)
        if left is None or right is None:
            settled.append(_absent(site, golden, candidate))
            continue
        left, right = _adopt(left, right)
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


def _asked(golden: RunSet, candidate: RunSet) -> set[Site]:
    within = {
        site
        for site in golden.records
        if any(stage_of(manifest, site) for manifest in candidate.manifests)
    }
    return within | set(candidate.records) | {Site.parse(text) for text in candidate.skipped()}


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
    steps = {(record.site.phase, record.site.step) for each in covering for record in each.records}
    if steps and (site.phase, site.step) not in steps:
        return f"the golden ran no {site.phase} step {site.step}"
    return ""


def _not_asked(site: Site, golden: Manifest, candidates: list[Manifest]) -> str:
    """Return why the candidate was never asked for a site within its stages, or nothing."""
    covering = [manifest for manifest in candidates if stage_of(manifest, site)]
    steps = {(record.site.phase, record.site.step) for each in covering for record in each.records}
    if steps and (site.phase, site.step) not in steps:
        return f"the candidate ran no {site.phase} step {site.step}"
    local = site.local if site.layer is not None else str(site)
    # A run's own patterns may want the site, whatever the golden's are.
    asked = any(each.capture(layer=site.layer, local=local) for each in covering)
    if not covering or asked or covering[-1].capture == golden.capture:
        return ""
    capture = covering[-1].capture
    # The name says enough, unless both have it.
    shown = capture if capture.name == golden.capture.name else capture.name
    return f"not captured by the candidate (capture={shown})"


def _adopt(golden: Found, candidate: Found) -> tuple[Found, Found]:
    """Give a dump's record, of which only shape and dtype are known, a run's axes and kind."""
    if golden.source.proved and not candidate.source.proved:
        return golden, _like(candidate, golden.record)
    if candidate.source.proved and not golden.source.proved:
        return _like(golden, candidate.record), candidate
    return golden, candidate


def _like(found: Found, model: Record) -> Found:
    if len(found.record.shape) != len(model.shape):
        return found
    return Found(found.source, replace(found.record, axes=model.axes, kind=model.kind))


def _misfit(golden: Found, candidate: Found) -> str:
    """Return why two records of one site cannot be laid on each other, or nothing."""
    left, right = golden.record, candidate.record
    return _whole_numbers(left, right) or _other_shape(left, right)


def _other_shape(left: Record, right: Record) -> str:
    shapes = f"shape {list(left.shape)} against {list(right.shape)}"
    if left.shape == right.shape:
        if left.axes != right.axes:
            return f"axes ({', '.join(left.axes)}) against ({', '.join(right.axes)})"
        same = left.kind == right.kind
        return "" if same else f"{left.kind.value} numbers against {right.kind.value}"
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


def _whole_numbers(golden: Record, candidate: Record) -> str:
    """Return which side holds integers where real numbers are due, or nothing."""
    if Kind.REAL not in (golden.kind, candidate.kind):
        return ""
    held = {"golden": golden.dtype, "candidate": candidate.dtype}
    wrong = [side for side, dtype in held.items() if "float" not in dtype]
    if not wrong:
        return ""
    sides = " and ".join(f"the {side} holds {held[side]} numbers" for side in wrong)
    return f"{sides} where real numbers are due: dump {'them' if wrong[1:] else 'it'} as floats"


def _too_small(side: str, record: Record) -> str:
    """Return that a tensor has next to no elements, or nothing."""
    count = prod(record.shape)
    if count > 1:
        return ""
    return f"the {side}'s tensor {'holds one element' if count else 'is empty'}"


def _kind(golden: Found, candidate: Found) -> Kind:
    if not candidate.source.proved or golden.record.kind is not Kind.REAL:
        return golden.record.kind
    manifest, site = candidate.source.manifest, candidate.record.site
    # What a block takes from the embedding is copied rows, like the embedding's own output.
    exact = is_feed(manifest, site) or arrived(manifest, site).path == "embed_tokens"
    return Kind.EXACT if exact else Kind.REAL


def _nothing(golden: RunSet, candidate: RunSet, refusals: list[str]) -> str:
    names = f"'{golden.sources[0].run.name}' and '{candidate.sources[0].run.name}'"
    if not refusals:
        return f"{names} share no site: give runs whose scopes overlap."
    texts = list(dict.fromkeys(refusals))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return (
        f"No site of {names} can be compared, these differ: {'; '.join(texts[:3])}{more}. "
        "Make both from the same weights and inputs."
    )
