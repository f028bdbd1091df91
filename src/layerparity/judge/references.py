"""References at compare time: which stored reference and floor a candidate's site is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from layerparity.anatomy.computed import Computed
from layerparity.anatomy.site import Site
from layerparity.judge.align import Pair
from layerparity.judge.stages import computed_at, stage_of
from layerparity.numbers.clean_slopes import ChainedSample, CleanSlopes, SlopeSample
from layerparity.numbers.floor import OFF, Floor
from layerparity.numbers.typical_floor import TypicalFloor
from layerparity.record.manifest import Manifest
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.references import CHAINED, ISOLATED, ReferenceEntry, StoredReferences
from layerparity.record.source import Source


class FoundReference(NamedTuple):
    """Where a site's reference is stored, for a candidate, whose stage had a ``feed``.

    ``dtype`` is what that computed in, the name of a `Computed`. Whether there is a floor of it,
    the entry says.
    """

    stored: StoredReferences
    entry: ReferenceEntry
    dtype: str
    feed: str


@dataclass(frozen=True)
class SiteReference:
    """One site's reference: its values, the floor, and the slopes clean ways show at such sites.

    ``values`` are floating, of the site's shape, one precision wider than the run. ``feed`` is how
    the stage was fed. ``typical`` is what one token's floor is as a rule, None where too few were
    seen.
    """

    values: torch.Tensor
    floor: Floor
    clean: CleanSlopes
    feed: str
    typical: TypicalFloor | None = None


class References:
    """The references of a golden side's runs, opened when first asked for."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], StoredReferences] = {}
        self._slopes: dict[tuple[str, str, str, str, str], CleanSlopes] = {}
        self._typical_floors: dict[tuple[str, str, str, str, str, str], TypicalFloor | None] = {}

    def of(self, pair: Pair) -> SiteReference | Reason:
        """Return what a pair is judged by, or why there is nothing."""
        wide = self.at(pair.site, pair.golden.source, pair.candidate.source)
        off = None if isinstance(wide, Reason) else golden_off(wide.floor.golden_share)
        return off or wide

    def narrower(self, pair: Pair) -> SiteReference | None:
        """Return a pair's reference with the floor of the golden's own type, if that is narrower.

        What the candidate computes in a wider one is nearer to the reference than that.
        """
        own = pair.golden.source.manifest.dtype
        found = self.found(pair.site, pair.golden.source, pair.candidate.source)
        if isinstance(found, Reason) or not _eps(own) > _eps(Computed.parse(found.dtype).dtype):
            return None
        stored, entry, _, feed = found
        floor = stored.floor(entry, own)
        if floor is None or golden_off(floor.golden_share) is not None:
            return None
        clean = self._clean_slopes(stored, entry, own)
        return SiteReference(stored.reference(entry), floor, clean, feed)

    def at(self, site: Site, golden: Source, candidate: Source) -> SiteReference | Reason:
        """Return the reference at a site as the candidate's stage was fed, or why there is none."""
        found = self.found(site, golden, candidate)
        if isinstance(found, Reason):
            return found
        stored, entry, dtype, feed = found
        floor = stored.floor(entry, dtype)
        if floor is None:
            return _no_floor(Computed.parse(dtype))
        clean, typical = self._clean_slopes(stored, entry, dtype), self.typical_floor(found)
        return SiteReference(stored.reference(entry), floor, clean, feed, typical)

    def found(self, site: Site, golden: Source, candidate: Source) -> FoundReference | Reason:
        """Return where the reference at a site is stored, or why there is none; no tensor is read.

        It is that of the candidate's stage as it was fed.
        """
        if not golden.proved or not golden.manifest.reference:
            return Reason(ReasonKind.NO_REFERENCE)
        asked = site
        if candidate.proved:
            site = computed_at(candidate.manifest, site)
        stage = stage_of(candidate.manifest, site) if candidate.proved else None
        if stage is None:
            return Reason(ReasonKind.CANDIDATE_IS_DUMP)
        stored = self._open(golden)
        feed = feed_of(candidate.manifest, golden.manifest, stage, site)
        entry = stored.find(stage, feed, site)
        if entry is None and asked != site:
            # Where a golden's part begins, the part before computed it.
            entry = stored.find(asked.path, feed, asked)
        if entry is None and feed == CHAINED:
            return Reason(ReasonKind.NO_FLOOR_OF_CHAIN)
        if entry is None:
            return Reason(ReasonKind.NO_REFERENCE_ALONE, {"stage": stage})
        return FoundReference(stored, entry, str(candidate.manifest.computed), feed)

    def local(self, pair: Pair) -> SiteReference | None:
        """Return the reference of a pair's site in its stage alone, whatever fed the candidate."""
        golden, candidate = pair.golden.source, pair.candidate.source
        stage = stage_of(candidate.manifest, pair.site) if candidate.proved else None
        if stage is None or not golden.proved or not golden.manifest.reference:
            return None
        stored, dtype = self._open(golden), str(candidate.manifest.computed)
        entry = stored.find(stage, ISOLATED, pair.site)
        floor = stored.floor(entry, dtype) if entry is not None else None
        if entry is None or floor is None:
            return None
        return SiteReference(
            stored.reference(entry), floor, self._clean_slopes(stored, entry, dtype), ISOLATED
        )

    def _open(self, golden: Source) -> StoredReferences:
        key = (golden.run.reference, golden.manifest.reference)
        if key not in self._opened:
            self._opened[key] = StoredReferences(golden.run.files, golden.manifest.reference)
        return self._opened[key]

    def typical_floor(self, found: FoundReference) -> TypicalFloor | None:
        """Return one token's floor as a rule at a site; None where too few are known."""
        stored, entry, dtype, _ = found
        site = entry.site
        key = (stored.digest, entry.stage, entry.feed, site.path, site.end, dtype)
        if key not in self._typical_floors:
            self._typical_floors[key] = stored.typical_floor(entry, dtype)
        return self._typical_floors[key]

    def _clean_slopes(
        self, stored: StoredReferences, entry: ReferenceEntry, dtype: str
    ) -> CleanSlopes:
        """Return the slopes of clean ways at the sites of this kind: all blocks' are one sample."""
        # A decode step's slopes are of one token, and larger.
        kind = (entry.site.local, entry.site.phase, entry.feed)
        key = (stored.digest, *kind, dtype)
        if key not in self._slopes:
            alike = [
                each.floors[dtype]
                for each in stored.entries()
                if (each.site.local, each.site.phase, each.feed) == kind
                and dtype in each.floors
                # From a golden that is off all ways differ by its slope.
                and max(each.floors[dtype].golden_shares, default=0.0) <= OFF
            ]
            sample = ChainedSample if entry.feed == CHAINED else SlopeSample
            samples = {name for each in alike for name in each.slopes}
            self._slopes[key] = CleanSlopes(
                {
                    name: sample.pooled(f.slopes[name] for f in alike if name in f.slopes)
                    for name in samples
                }
            )
        return self._slopes[key]


def _eps(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def _no_floor(computed: Computed) -> Reason:
    """Return why nothing is judged of a candidate that computes in what has no floor."""
    dtype, operands = computed
    if not operands:
        return Reason(ReasonKind.NO_FLOOR_OF_DTYPE, {"dtype": dtype})
    return Reason(ReasonKind.NO_FLOOR_OF_OPERANDS, {"dtype": dtype, "operands": [*operands]})


def golden_off(share: float) -> Reason | None:
    """Return why nothing is judged where a golden has this share of its floor; None if it can be.

    What a golden that is off shows, no other run has to show.
    """
    return Reason(ReasonKind.GOLDEN_OFF, {"times": share}) if share > OFF else None


def feed_of(candidate: Manifest, golden: Manifest, stage: str, site: Site) -> str:
    """Return how a candidate's stage was fed: what the golden had there, or its own chain.

    A golden of a candidate's own values had what the candidate did.
    """
    if golden.values_of:
        return ISOLATED
    for feed in candidate.feeds_of(*site.pass_step):
        if feed.stage == stage:
            return ISOLATED if golden.hash_at(feed.site) == feed.digest else CHAINED
    return CHAINED
