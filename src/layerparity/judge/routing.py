"""Routing: at which tokens both sides chose alike, and whether where they did not was a tie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import PREFILL, Kind, Place, Site
from layerparity.judge.references import SiteReference
from layerparity.judge.rows import by_token, real_tokens
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.numbers.metrics.sets import sets_agree
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import DECIDED, Outcome, Row

CHOICES = "choices"
# What depends on each token's experts one by one, and not on those of tokens before it.
_BY_EXPERT = ("mlp.experts:out", "mlp:out")
# Two scores, each off by the noise of both sides: a gap of more standard errors is no tie.
TIE = 8.0


@dataclass
class Routing:
    """What was chosen inside the blocks of two sides: experts by a router, tokens by attention."""

    golden: RunSet
    candidate: RunSet
    blocks: Blocks
    _choices: dict[tuple[int, tuple[str, int]], list[Site]] = field(init=False)
    _seen: dict[Site, torch.Tensor | None] = field(init=False)
    _untouched: dict[tuple[int, tuple[str, int]], torch.Tensor | None] = field(init=False)
    _layers: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._choices, self._seen, self._untouched = {}, {}, {}
        for site, own in self.golden.records.items():
            if site.layer is None:
                continue
            self._layers = max(self._layers, site.layer + 1)
            if own.record.kind is Kind.INDEX_SET:
                self._choices.setdefault((site.layer, site.pass_step), []).append(site)

    def agreeing(self, site: Site) -> torch.Tensor | None:
        """Return bool [batch, token]: both chose the same wherever a site's block did before it.

        None where the site stands before every choice of its block, or nothing is known of one.
        """
        if site.layer is None:
            return None
        choices = self._choices.get((site.layer, site.pass_step), [])
        block = self.blocks.block(site.layer, [each.local for each in (site, *choices)])
        before = [each for each in choices if block.is_from(site.local, each.local)]
        return _none_of([self._apart(each) for each in before])

    def untouched(self, site: Site) -> torch.Tensor | None:
        """Return bool [batch, token]: no token up to there was routed apart in an earlier block."""
        before = site.layer if site.layer is not None else self._layers
        key = (before, site.pass_step)
        if key not in self._untouched:
            earlier = [self._choices.get((layer, site.pass_step), []) for layer in range(before)]
            apart = [self._apart(each) for choices in earlier for each in choices]
            # Later tokens of a sequence attend to one that was routed apart.
            touched = [each.cumsum(-1) > 0 for each in apart if each is not None]
            self._untouched[key] = _none_of(touched)
        return self._untouched[key]

    def experts(self, site: Site) -> torch.Tensor | None:
        """Return which experts the golden sent each token to, bool [batch, token, experts]."""
        choices = self.sent(site)
        if choices is None:
            return None
        chosen = _load(choices).long()
        return torch.zeros(*chosen.shape[:-1], int(chosen.max()) + 1, dtype=torch.bool).scatter_(
            -1, chosen, value=True
        )

    def sent(self, site: Site) -> SideRecord | None:
        """Return the golden's choices of the experts that a site's tokens were sent to, or None."""
        if site.layer is None or site.local not in _BY_EXPERT:
            return None
        routed = Site(str(Place(site.layer, "mlp.gate")), CHOICES, site.phase, site.step)
        return self.golden.records.get(routed)

    def _apart(self, choices: Site) -> torch.Tensor | None:
        """Return bool [batch, token], true at real tokens for which the two sides chose otherwise.

        None where one of them shows no choice of its own, or computed with the other's, or they
        chose different numbers.
        """
        if choices not in self._seen:
            left, right = self.golden.records[choices], self.candidate.records.get(choices)
            alike = right is None or replayed(right) or left.source.manifest.values_of
            if right is None or alike or left.record.shape != right.record.shape:
                self._seen[choices] = None
            else:
                self._seen[choices] = _apart(left, right)
        return self._seen[choices]


def _apart(left: SideRecord, right: SideRecord) -> torch.Tensor:
    """Return bool [batch, token], true at real tokens whose sets differ; see `sets_agree`."""
    apart = ~sets_agree(_load(left), _load(right))
    # Padding comes first in a sequence, and no real token attends to it.
    real = real_tokens(apart, left.source.mask if left.record.site.phase == PREFILL else None)
    return apart & real if real.shape == apart.shape else apart


def _none_of(masks: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return where none of some masks of one shape is true; None of none."""
    known = [each for each in masks if each is not None]
    return ~torch.stack(known).any(0) if known else None


def replayed(choices: SideRecord) -> bool:
    """Say whether a run computed with the golden's choices, and only shows its own."""
    return bool(choices.source.manifest.numerics.get("replay"))


def flips(
    golden: torch.Tensor,
    candidate: torch.Tensor,
    scores: SiteReference,
    mask: torch.Tensor,
    groups: SiteReference | None = None,
) -> dict[str, float]:
    """Return how many tokens chose otherwise, and how many of them not for noise.

    ``golden`` and ``candidate`` are int64 [tokens, k]; ``scores`` what the reference chose from,
    [tokens, choices]; ``mask`` bool [tokens]. A flip is noise where every expert that was given up
    for another stood within `TIE` standard errors of it in the reference. Where a router chooses
    among ``groups`` of experts first, [tokens, group], a flip between two groups is one as well.
    """
    wide, noise = _scores_with_noise(scores, mask)
    of_groups = _scores_with_noise(groups, mask) if groups is not None else None
    apart = ~sets_agree(golden, candidate) & mask
    margin, outside = math.inf, 0
    for token in torch.nonzero(apart).flatten().tolist():
        gap, limit = _gap(golden[token], candidate[token], wide[token]), TIE * float(noise[token])
        if not gap <= limit and of_groups is not None:
            scores_of_groups, noise_of_groups = of_groups
            size = wide.shape[-1] // scores_of_groups.shape[-1]
            left, right = (each[token] // size for each in (golden, candidate))
            gap = _gap(left, right, scores_of_groups[token])
            limit = TIE * float(noise_of_groups[token])
        margin = min(margin, gap)
        # Noise that is no number excuses nothing.
        outside += int(not gap <= limit)
    metrics = {"flips": float(apart.sum()), "flips_outside_noise": float(outside)}
    return metrics | ({"tie_margin": margin} if math.isfinite(margin) else {})


def _scores_with_noise(
    scores: SiteReference, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reference's scores, float64 [token, choice], and their noise, float64 [token]."""
    wide = scores.values.double().reshape(mask.numel(), -1)
    floors = scores.floor.tokens.double().amax(0)
    if scores.typical is not None:
        typical = scores.typical.of_tokens(wide.square().sum(1))
        freedom = min(scores.typical.freedom, wide.shape[-1])
        floors = scores.typical.raised_to_typical(floors, typical, freedom)
    # A score of zero is no score: attention does not look ahead, a router not into groups that it
    # passed over, and nothing rounds there.
    noise = (floors / wide.ne(0).sum(1).clamp_min(1)).sqrt()
    return wide, torch.maximum(noise, noise[mask].mean())


def _gap(golden: torch.Tensor, candidate: torch.Tensor, scores: torch.Tensor) -> float:
    """Return the largest score given up for a smaller one: best of the lost - worst of the new."""
    left, right = set(golden.tolist()), set(candidate.tolist())
    lost, new = list(left - right), list(right - left)
    if not lost or not new or min(*lost, *new) < 0 or max(new) >= scores.numel():
        return math.inf
    return float(scores[lost].max() - scores[new].min())


# Why a site has too few tokens that were routed alike.
_TOO_FEW = (ReasonKind.ROUTED_APART, ReasonKind.NO_SET_AGREES, ReasonKind.TIES)
# With fewer of the tokens left, what remains is no sample of a site.
ENOUGH = 0.5


def skip_ties(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, those skipped whose tokens ties routed apart, if other steps show the site.

    A decode step has one token of each sequence: all steps together are the sample of a site. What
    ties do not explain, or what is too much, stays inconclusive.
    """
    shares: dict[tuple[str, str, str], list[float]] = {}
    unexplained = set()
    for row in rows:
        if row.kind is Kind.INDEX_SET and row.outcome is Outcome.FAIL:
            unexplained.add((row.site.layer, row.site.pass_step))
        if row.outcome in DECIDED or _lacks_tokens(row):
            share = 0.0 if _lacks_tokens(row) else row.metrics.get("agreeing_tokens", 1.0)
            shares.setdefault(_across_steps(row.site), []).append(share)
    return [
        _of_ties(row, fmean(shares[_across_steps(row.site)]))
        if _lacks_tokens(row) and (row.site.layer, row.site.pass_step) not in unexplained
        else row
        for row in rows
    ]


def _lacks_tokens(row: Row) -> bool:
    return row.outcome not in DECIDED and row.why is not None and row.why.kind in _TOO_FEW


def _across_steps(site: Site) -> tuple[str, str, str]:
    return site.path, site.end, site.phase


def _of_ties(row: Row, share: float) -> Row:
    """Return a row without tokens as skipped, where the ``share`` of all steps' is enough."""
    if share >= ENOUGH:
        return replace(row, outcome=Outcome.SKIPPED, why=Reason(ReasonKind.TIES, {"share": share}))
    why = row.lacking or Reason(ReasonKind.NO_SET_AGREES)
    return replace(row, outcome=Outcome.INCONCLUSIVE, why=why)


def scores_of(site: Site) -> Site:
    """Return the site whose reference holds the scores that a choice was made from."""
    if site.path == "tokens":
        step = (PREFILL, 0) if site.step == 0 else (site.phase, site.step)
        return Site("lm_head", "out", *step)
    return Site(site.path, "scores", site.phase, site.step)


def _load(own: SideRecord) -> torch.Tensor:
    return by_token(own.source.load(own.record), own.record.axes)
