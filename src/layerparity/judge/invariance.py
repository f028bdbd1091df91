"""Invariance: hold a run against itself in another arrangement, to the bit, then to the floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from layerparity.anatomy.blocks import Blocks, by_layer
from layerparity.anatomy.site import PREFILL, Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.conclude import conclude
from layerparity.judge.references import References
from layerparity.judge.replays import replayed, token_floor
from layerparity.judge.rows import by_token, has_tokens, places, real_tokens
from layerparity.judge.sides import RunSet
from layerparity.mistakes.replayed import Replayed, Trial
from layerparity.record.guilt import Guilt
from layerparity.record.reason import ReasonKind
from layerparity.record.source import RunSource
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row

RATIO = "error_ratio"
_APART = (
    ReasonKind.ROUTED_APART,
    ReasonKind.ROUTED_APART_IN_CHAIN,
    ReasonKind.UNSEEN_ROUTING,
)


@dataclass(frozen=True)
class SiteDifference:
    """Where the bits of a site differ: the first real token, and the largest difference.

    ``sequence`` and ``position`` count from 0, padding apart; both are None for a site without
    tokens. ``tokens`` differ. ``largest`` is of absolute values; None for choices.
    """

    site: Site
    sequence: int | None
    position: int | None
    tokens: int
    largest: float | None


@dataclass(frozen=True)
class SelfComparison:
    """How a side agrees with itself: of ``sites`` so many are ``equal`` to the bit.

    ``first`` is the first difference in forward order. Where there is one, ``outcome`` judges all
    sites against the noise floor. ``row`` is the one that counts: the first that fails, else the
    first that the variation lacks, else that with the largest R; ``at`` is the difference there.
    ``failing`` sites leave the floor. ``off`` is the first of those that differ at which the run
    itself is off its reference, so that nothing can be told there.
    """

    sites: int
    equal: int
    first: SiteDifference | None = None
    outcome: Outcome = Outcome.PASS
    row: Row | None = None
    at: SiteDifference | None = None
    failing: int = 0
    limit: float | None = None
    off: Site | None = None

    @property
    def has_no_floor(self) -> bool:
        """Whether it was not judged for want of a floor; NaN has no ratio either, and fails."""
        return self.outcome is Outcome.INCONCLUSIVE and self.ratio is None and self.off is None

    @property
    def routed_apart(self) -> bool:
        """Whether it was not judged as too few tokens met the same experts."""
        why = None if self.row is None else self.row.why
        return why is not None and why.kind in _APART

    @property
    def ratio(self) -> float | None:
        """R of the row that counts, where it has one."""
        return None if self.row is None else self.row.metrics.get(RATIO)


@dataclass(frozen=True)
class SelfJudge:
    """Judges what differs from ``base``: by its own floor, or by that of the ``golden`` it was fed.

    Of a golden's floor, sites at which the base leaves it ``already`` say nothing of the variation.
    """

    base: StoredRun
    tolerance: Any
    golden: tuple[StoredRun, ...] = ()
    already: frozenset[Site] = frozenset()

    @classmethod
    def of(cls, base: StoredRun, tolerance: Any, golden: Sequence[StoredRun] = ()) -> SelfJudge:
        """Return the judge of a run, which has a floor of its own or was fed from a golden."""
        manifest = base.read_manifest()
        if manifest.reference:
            return cls(base, tolerance)
        rows = conclude(golden, [base], tolerance).rows if golden else ()
        already = frozenset(row.site for row in rows if row.outcome is Outcome.FAIL)
        return cls(base, tolerance, tuple(golden), already)

    def compare(self, varied: StoredRun, shared: bool = False) -> SelfComparison:
        """Compare every site of the base and of a variation of it, their padding left out.

        With ``shared`` only those that both observed. The floor is asked only where bits differ.
        Raises UserError where a tensor is damaged, or the run holds NaN.
        """
        left, right = RunSource(self.base), RunSource(varied)
        sites = {record.site for record in left.manifest.records}
        if shared:
            sites &= {record.site for record in right.manifest.records}
            if not sites:
                raise UserError("nothing that is observed is seen otherwise, too")
        order = _blocks(left).sorted(sites)
        found = {each: apart for each in order if (apart := difference(each, left, right))}
        if not found:
            return SelfComparison(len(order), len(order))
        verdict = conclude(self.golden or [self.base], [varied], self.tolerance)
        # Which rows are judged, whatever the whole verdict doubts: a short text leaves experts
        # unused.
        judged = found.keys() - self.already
        rows = [row for row in verdict.rows if row.site in judged]
        failing = [row for row in rows if row.outcome is Outcome.FAIL]
        missing = [row for row in rows if row.outcome is Outcome.MISSING]
        unsure = [row for row in rows if row.outcome is Outcome.INCONCLUSIVE]
        why = {row.site: row.why.kind for row in unsure if row.why is not None}
        off = next((site for site in why if why[site] is ReasonKind.GOLDEN_OFF), None)
        if failing:
            outcome, counting = Outcome.FAIL, failing[:1]
        elif missing:
            outcome, counting = Outcome.MISSING, missing[:1]
        else:
            untold = unsure or not rows
            outcome, counting = Outcome.INCONCLUSIVE if untold else Outcome.PASS, unsure or rows
        row = max(counting, key=lambda each: each.metrics.get(RATIO, 0.0), default=None)
        at = None if row is None else found[row.site]
        if failing and at is not None:
            at = self._beyond(at, right, verdict.limits.get(RATIO, 1.0))
        return SelfComparison(
            len(order),
            len(order) - len(found),
            next(iter(found.values())),
            outcome,
            row,
            at,
            len(failing),
            verdict.limits.get(RATIO),
            off,
        )

    def _beyond(self, apart: SiteDifference, varied: RunSource, limit: float) -> SiteDifference:
        """Return a difference with the first token whose error is above the limit, if one is.

        Others before it may be rounded otherwise.
        """
        site, golden = apart.site, [RunSource(each) for each in self.golden or (self.base,)]
        right, left = RunSet(golden), RunSource(self.base)
        mine, other = left.manifest.record(site), varied.manifest.record(site)
        floor = None
        if site in right.records and mine is not None and mine.kind is Kind.REAL:
            floor = token_floor(site, right, RunSet([varied]), References())
        if floor is None or mine is None or other is None or apart.position is None:
            return apart
        ours, theirs = (
            by_token(each.double(), mine.axes) for each in (left.load(mine), varied.load(other))
        )
        real = real_tokens(ours, left.mask if site.phase == PREFILL else None)
        off = (theirs - ours)[real].flatten(1).norm(dim=1)
        # A token may happen to be rounded exactly.
        usual = floor.square().mean().sqrt()
        beyond = (~(off <= limit * floor.clamp(min=float(usual)))).nonzero().flatten()
        if not len(beyond):
            return apart
        first = real.flatten().nonzero().flatten()[beyond[:1]]
        sequence, position = places(first, real)[0]
        return replace(apart, sequence=sequence, position=position, tokens=len(beyond))

    def replayed(self, varied: StoredRun, site: Site, trials: Iterable[Trial]) -> Replayed:
        """Return what came of known mistakes in the block of a site that leaves the floor."""
        right = RunSet([RunSource(each) for each in self.golden or (self.base,)])
        sides = right, RunSet([RunSource(varied)])
        guilt = Guilt(site.place, site=site)
        if site not in right.records:
            return Replayed()
        return replayed(guilt, sides, _blocks(RunSource(self.base)), trials)


def name_of(axis: str, size: int, detail: str) -> str:
    """Return what a variation is called; of size 0 there is only one."""
    return " ".join(filter(None, (axis, str(size or ""), detail)))


def _blocks(source: RunSource) -> Blocks:
    return Blocks.of(source.manifest.model.model_type, by_layer(source.manifest.blocks))


def difference(site: Site, left: RunSource, right: RunSource) -> SiteDifference | None:
    """Return where two runs differ at a site, in the bits of real tokens; None where nowhere.

    A site that the second run lacks differs as a whole.
    """
    mine, other = left.manifest.record(site), right.manifest.record(site)
    assert mine is not None, "the site is one of the first run's"
    if other is None:
        return SiteDifference(site, None, None, 0, math.inf)
    if mine.digest == other.digest:
        return None
    ours, theirs = left.load(mine), right.load(other)
    if ours.shape != theirs.shape:
        return SiteDifference(site, None, None, 0, math.inf)
    if not has_tokens(mine.axes):
        return SiteDifference(site, None, None, 0, _largest_of(ours, theirs))
    a, b = (by_token(each, mine.axes) for each in (ours, theirs))
    real = real_tokens(a, left.mask if site.phase == PREFILL else None)
    apart = (bits(a) != bits(b)).flatten(2).any(-1) & real
    tokens = apart.flatten().nonzero().flatten()
    if not len(tokens):
        return None
    sequence, position = places(tokens[:1], real)[0]
    return SiteDifference(site, sequence, position, len(tokens), _largest_of(a[apart], b[apart]))


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any shape and dtype as the bytes of its elements, [..., byte]."""
    return value.contiguous().unsqueeze(-1).view(torch.uint8)


def _largest_of(a: torch.Tensor, b: torch.Tensor) -> float | None:
    if not a.is_floating_point():
        return None
    return float((a.double() - b.double()).abs().max())
