"""Replays: whether a known mistake, planted in the golden's block, gives the candidate's numbers.

At every site of the block that both sides hold, and at every token: one that does not fit refutes
the mistake. What rounding allows is the site's own noise floor, where the golden has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from layerparity.anatomy.block import Block
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Place, Site, overlap, within
from layerparity.judge.ranks import replicas_apart
from layerparity.judge.references import References, SiteReference
from layerparity.judge.rows import by_token, has_tokens, real_tokens
from layerparity.judge.sides import RunSet
from layerparity.judge.values import values_at
from layerparity.judge.weights_kind import PACKED
from layerparity.mistakes.block import CHOICES, WEIGHTS
from layerparity.mistakes.catalogue import catalogue, known_fault, suspected
from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.fault import Fault
from layerparity.mistakes.replayed import Replayed, Replays, Trial
from layerparity.mistakes.values import ENOUGH, Values
from layerparity.numbers.floor import PUBLISHED
from layerparity.numbers.pieces import LORA
from layerparity.record.guilt import Guilt
from layerparity.record.manifest import ORIGINAL
from layerparity.record.source import RunSource
from layerparity.record.weights import WeightFinding

Trials = Iterable[Trial]
# A right computation is off by at most so many noise floors, and its worst token by so many more.
_FLOORS, _ONE_TOKEN = 2.0, 4.0
# Of the candidate's error at the guilty site, what a mistake may leave unexplained.
_LEFT = 0.2
# Of the tokens, how many a near tie may route apart from a mistake's own choices.
_ROUTED_APART = 0.1


@dataclass(frozen=True)
class HeldSite:
    """A site on both sides, and the noise floor of each real token, float64 [token], if known."""

    values: Values
    floor: torch.Tensor | None
    chosen: bool

    def fits(self, made: torch.Tensor, kept: torch.Tensor) -> bool:
        """Say whether numbers [token, ...] are the candidate's to rounding, of ``kept`` tokens.

        ``kept`` is bool [token].
        """
        if made.shape != self.values.candidate.shape or not bool(made.isfinite().all()):
            return False
        right, golden = self.values.candidate[kept], self.values.golden[kept]
        made = made[kept]
        off, size, grown = ((x.flatten(1).norm(dim=1)) for x in (right - made, right, made))
        whole = float(size.norm())
        room = self.values.limit * size.clamp(min=1e-3 * whole / max(len(size), 1) ** 0.5)
        if self.floor is not None:
            floor = self.floor[kept]
            # By luck a token rounds exactly. What is larger rounds by more.
            floor = floor.clamp(min=float(floor.square().mean().sqrt()))
            times = max(1.0, float(grown.norm()) / max(float(golden.norm()), 1e-300))
            room = torch.maximum(room, _FLOORS * times * floor)
        return bool(off.norm() <= room.norm()) and bool((off <= _ONE_TOKEN * room).all())

    def explained(self, made: torch.Tensor, kept: torch.Tensor) -> bool:
        """Say whether numbers [token, ...] leave little of the error of ``kept``, bool [token]."""
        if made.shape != self.values.candidate.shape:
            return False
        right, golden = self.values.candidate[kept], self.values.golden[kept]
        left, apart = (right - made[kept]).norm(), (right - golden).norm()
        return bool(left < _LEFT * apart)

    def alike(self, made: torch.Tensor) -> torch.Tensor:
        """Return bool [token]: where a mistake chooses what the candidate chose."""
        return (made == self.values.candidate).flatten(1).all(1)


@dataclass(frozen=True)
class ReplayJudge:
    """What trials of a guilty block are held against: its sites by their address in the block."""

    guilty: str
    sites: Mapping[str, HeldSite]
    block: Block

    def shows(self, made: Mapping[str, torch.Tensor], coarse: bool = False) -> bool:
        """Say whether numbers, each [token, ...], are the candidate's at all sites of the block.

        Of a ``coarse`` mistake they need not be so to rounding: by a last place before it, a number
        is a step of few bits off behind it.
        """
        everything = torch.ones(len(self.sites[self.guilty].values.golden), dtype=torch.bool)
        alike = everything
        chosen = self.sites.get(CHOICES)
        if chosen is not None and CHOICES in made:
            if made[CHOICES].shape != chosen.values.candidate.shape:
                return False
            alike = chosen.alike(made[CHOICES])
            if float((~alike).double().mean()) > _ROUTED_APART or int(alike.sum()) < ENOUGH:
                return False
        for local, held in self.sites.items():
            if local not in made:
                continue
            after = local == WEIGHTS or self.block.is_from(local, CHOICES)
            kept = alike if after else everything
            right = held.chosen or held.fits(made[local], kept)
            if not right and not (coarse and held.explained(made[local], kept)):
                return False
            if local == self.guilty and not held.explained(made[local], kept):
                return False
        return self.guilty in made

    def is_sound(self, made: Mapping[str, torch.Tensor]) -> bool:
        """Say whether a sound block gives, at the guilty site, the golden's numbers."""
        held = self.sites[self.guilty]
        if self.guilty not in made or made[self.guilty].shape != held.values.golden.shape:
            return False
        off = (made[self.guilty] - held.values.golden).norm()
        return bool(off < _LEFT * (held.values.candidate - held.values.golden).norm())

    def computed_as(self, made: Mapping[str, torch.Tensor]) -> ReplayJudge:
        """Return a judge of the same candidate against numbers, each [token, ...]."""
        sites = {
            local: replace(held, values=replace(held.values, golden=made[local]))
            for local, held in self.sites.items()
            if local in made and made[local].shape == held.values.golden.shape
        }
        return replace(self, sites=sites or self.sites)


def with_replays(
    evidence: Evidence,
    guilt: Guilt,
    sides: tuple[RunSet, RunSet],
    blocks: Blocks,
    replays: Replays,
) -> Evidence:
    """Return evidence with what came of planting known mistakes in the golden's guilty block.

    None is planted where weights explain the place (that they are reordered does not say how, nor
    that packed ones are changed) or a cause is shown already that no mistake refines, where only
    decoding shows it, and where either side lacks the site. Groups of the candidate's ranks divide
    their number: mistakes of others are none of it. ``sides`` are golden and candidate.
    """
    judge, blamed = _judge_of(guilt, *sides, blocks), evidence.blamed
    explained = any(each.what != "reordered" for each in blamed)
    if judge is None or (explained and not _are_packed(blamed, sides[0])):
        return evidence
    known = {each.id for each in suspected(evidence) if each.shown}

    def asked(fault: Fault) -> bool:
        right = fault.by_weights and evidence.weights_compared and not blamed
        right = right or (explained and not fault.quantised)
        told = known <= {*fault.refines}
        shared = 1 in (fault.degree, guilt.degree) or guilt.degree % fault.degree == 0
        # What is packed, another format may pack alone.
        here = bool(fault.quantised) or overlap(fault.component, guilt.component)
        return told and not right and shared and here

    if known and not any(map(asked, map(known_fault, catalogue()))):
        return evidence

    assert guilt.site is not None
    golden, candidate = (side.records[guilt.site] for side in sides)
    # A dump says of each tensor alone in what it was computed.
    whole = candidate.source.manifest.dtype if candidate.source.proved else ""
    dtype = whole or candidate.record.dtype
    fed = _fed(guilt, sides[1]) if golden.source.manifest.values_of else {}
    trials = replays(golden.source.run, Place(guilt.layer), dtype, asked, fed)
    return replace(evidence, replayed=_replayed(judge, guilt, sides[0], trials))


def replayed(
    guilt: Guilt, sides: tuple[RunSet, RunSet], blocks: Blocks, trials: Trials
) -> Replayed:
    """Return what came of trials of a guilty block, the sound one first: nothing where it is not.

    ``sides`` are golden and candidate.
    """
    judge = _judge_of(guilt, *sides, blocks)
    return Replayed() if judge is None else _replayed(judge, guilt, sides[0], trials)


def _replayed(judge: ReplayJudge, guilt: Guilt, golden: RunSet, trials: Trials) -> Replayed:
    assert guilt.site is not None
    source = golden.records[guilt.site].source
    shown: list[Fault] = []
    tried: set[str] = set()
    # Most mistakes are refuted by these alone.
    few = {judge.guilty, CHOICES}
    for trial in trials:
        made = _rows(trial, guilt, golden, few)
        if trial.fault is None and ORIGINAL in source.manifest.numerics:
            # The golden's numbers are of other weights: with these, a sound block gives others.
            judge = judge.computed_as(_rows(trial, guilt, golden, judge.sites))
        elif trial.fault is None:
            if not judge.is_sound(made):
                break
        elif judge.shows(made, trial.fault.coarse) and judge.shows(
            _rows(trial, guilt, golden, judge.sites), trial.fault.coarse
        ):
            shown.append(trial.fault)
        elif not trial.drawn:
            tried.add(trial.fault.cause)
    refuted = tried - {fault.cause for fault in shown}
    own = [fault for fault in shown if fault.degree == guilt.degree > 1] or shown
    return Replayed(tuple(own), frozenset(refuted))


def _are_packed(findings: Sequence[WeightFinding], golden: RunSet) -> bool:
    """Say whether weights are wrong that are stored packed, in a way that has no name yet."""
    held = (s.effective.get(e.stage, {}).get(e.name) for e in findings for s in golden.sources)
    packed = any(each is not None and each.stored in {*PACKED, LORA} for each in held)
    return packed and not any(each.lacks for each in findings)


def _fed(guilt: Guilt, candidate: RunSet) -> dict[str, torch.Tensor]:
    """Return a candidate's own values in the guilty block, [batch, token, ...] by address there.

    A golden of them went on from each, and computed none from what it had computed itself. Choices
    are among them where the router is none of what went wrong.
    """
    assert guilt.site is not None
    ends, fed = (":in", ":out"), {}
    routes = within(guilt.component, CHOICES.partition(":")[0])
    kinds = {Kind.REAL} if routes else {Kind.REAL, Kind.INDEX_SET}
    for site, (source, record) in candidate.records.items():
        inside = site.place.stage == guilt.place.stage and site.local not in ends
        if inside and site.pass_step == guilt.site.pass_step and record.kind in kinds:
            fed[site.local] = source.load(record)
    return fed


def _judge_of(
    guilt: Guilt, golden: RunSet, candidate: RunSet, blocks: Blocks
) -> ReplayJudge | None:
    """Return what both sides hold of a guilty block in the prefill; None without the guilty site.

    A dump is no golden whose block could be computed again.
    """
    own = golden.records.get(guilt.site) if guilt.site is not None else None
    if guilt.site is None or guilt.layer is None or guilt.decoding or own is None:
        return None
    if not isinstance(own.source, RunSource):
        return None
    references, sites = References(), {}
    apart = replicas_apart(candidate, guilt.site) is not None
    for site, held in golden.records.items():
        if site.place.stage != guilt.place.stage or site.pass_step != guilt.site.pass_step:
            continue
        values = values_at(guilt, golden, candidate, site.local)
        if values is None or len(values.golden) < ENOUGH or site.local == ":in":
            continue
        both = (site.local, guilt.site.local)
        if apart and blocks.block(guilt.layer, both).is_from(*both):
            # Each rank went on with a replica of its own.
            continue
        chosen = not held.record.dtype.startswith(("float", "bfloat"))
        floor = None if chosen else token_floor(site, golden, candidate, references)
        sites[site.local] = HeldSite(values, floor, chosen)
    block = blocks.block(guilt.layer, sites)
    return ReplayJudge(guilt.site.local, sites, block) if guilt.site.local in sites else None


def token_floor(
    site: Site, golden: RunSet, candidate: RunSet, references: References
) -> torch.Tensor | None:
    """Return the largest error of clean ways at each real token, float64 [token]; or None."""
    left, right = golden.records[site], candidate.records[site]
    wide = references.at(site, left.source, right.source)
    if not isinstance(wide, SiteReference):
        return None
    # What other weights move is no rounding.
    rounding = [not name.startswith(PUBLISHED) for name in wide.floor.ways]
    squares = wide.floor.tokens[rounding].amax(0)
    mask = left.source.mask
    return (squares if mask is None else squares[mask.flatten()]).sqrt()


def _rows(
    trial: Trial, guilt: Guilt, golden: RunSet, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return a trial's real tokens at the wanted sites that the golden holds, float64 [token, ...].

    Sites are ``wanted`` by their address in the block.
    """
    assert guilt.site is not None
    rows = {}
    for local in wanted:
        held, value = golden.records.get(guilt.site.beside(local)), trial.tensors.get(local)
        if (
            held is None
            or value is None
            or value.shape != held.record.shape
            or not has_tokens(held.record.axes)
        ):
            continue
        view = by_token(value.double(), held.record.axes)
        rows[local] = view[real_tokens(view, held.source.mask)]
    return rows
