"""Calibrate: measure a pair's deviation from its reference, in units of the noise floor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from layerparity.anatomy.site import Kind
from layerparity.judge.align import Pair
from layerparity.judge.references import References, SiteReference
from layerparity.judge.routing import Routing, flips, scores_of
from layerparity.judge.rows import by_token, has_tokens
from layerparity.judge.sides import RunSet
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.token_sums import TokenLayout, heads_of, token_layout
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.references import CHAINED

# With fewer of the tokens left, what remains is no sample of the site.
ENOUGH = 0.5


@dataclass
class Calibrated:
    """What one pair has beside its plain metrics; ``lacking`` is why there is nothing.

    ``profiles`` hold, by metric and grouping, a value for each group.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, list[float]] = field(default_factory=dict)
    lacking: Reason | None = None


class Calibration:
    """The references and routing of one comparison."""

    def __init__(self, golden: RunSet, candidate: RunSet) -> None:
        self.references = References()
        self.routing = Routing(golden, candidate)
        records = (each.record for each in golden.records.values())
        self._heads = heads_of((each.site.end, each.shape, each.axes) for each in records)

    def of(
        self, pair: Pair, golden: torch.Tensor, candidate: torch.Tensor, mask: torch.Tensor | None
    ) -> Calibrated:
        """Return a pair's metrics over its real tokens.

        ``golden`` and ``candidate`` are as stored, of the pair's axes; ``mask`` is bool [batch,
        token], None for all. Raises UserError where a reference is damaged.
        """
        axes = pair.golden.record.axes
        if pair.kind not in (Kind.REAL, Kind.INDEX_SET) or not has_tokens(axes):
            return Calibrated()
        left, right = by_token(golden, axes), by_token(candidate, axes)
        real = torch.ones(left.shape[:2], dtype=torch.bool) if mask is None else mask
        if pair.kind is Kind.INDEX_SET:
            return self._choices(pair, left, right, real)
        judged = self.tensors(pair, left, right, real)
        if isinstance(judged, Reason):
            return Calibrated(lacking=judged)
        off = deviation(judged)
        share = judged.tokens.numel() / max(judged.real, 1)
        return Calibrated(off.metrics | {"agreeing_tokens": share}, off.profiles)

    def tensors(
        self, pair: Pair, golden: torch.Tensor, candidate: torch.Tensor, real: torch.Tensor
    ) -> JudgedSite | Reason:
        """Return a site's judged tokens with reference and floor, or why there are none.

        ``golden`` and ``candidate`` are [batch, token, ...], ``real`` is bool [batch, token].
        """
        wide = self.references.of(pair)
        if isinstance(wide, Reason):
            return wide
        # Judged are the tokens that nothing but arithmetic sets apart.
        alike = [self.routing.agreeing(pair.site)]
        if wide.feed == CHAINED or pair.site.local == ":in":
            alike.append(self.routing.untouched(pair.site))
        judged = real
        for each in alike:
            judged = judged & each if each is not None and each.shape == real.shape else judged
        share = float(judged.sum()) / max(float(real.sum()), 1.0)
        if share < ENOUGH:
            chained = wide.feed == CHAINED
            kind = ReasonKind.ROUTED_APART_IN_CHAIN if chained else ReasonKind.ROUTED_APART
            return Reason(kind, {"share": share})
        return self._judged_site(pair, (golden, candidate), wide, judged, int(real.sum()))

    def layout(self, pair: Pair) -> TokenLayout:
        """Return how the elements of one token are laid out at a site."""
        record = pair.golden.record
        return token_layout(record.shape, record.axes, pair.site.local, self._heads)

    def _choices(
        self, pair: Pair, left: torch.Tensor, right: torch.Tensor, real: torch.Tensor
    ) -> Calibrated:
        """Judge choices, [batch, token, k], by the scores they were made from."""
        site = scores_of(pair.site)
        wide = self.references.at(site, pair.golden.source, pair.candidate.source)
        if isinstance(wide, Reason):
            return Calibrated(lacking=wide)
        if pair.site.path == "tokens":
            # The next token is chosen from the scores of each sequence's last one.
            tokens = wide.floor.tokens.unflatten(-1, (real.numel(), -1))[..., -1]
            floor = replace(wide.floor, tokens=tokens, real=None)
            wide = replace(wide, values=wide.values[:, -1:], floor=floor)
        ours, theirs = (each.reshape(real.numel(), -1).long() for each in (left, right))
        return Calibrated(flips(ours, theirs, wide, real.flatten()))

    def _judged_site(
        self,
        pair: Pair,
        sides: tuple[torch.Tensor, torch.Tensor],
        wide: SiteReference,
        judged: torch.Tensor,
        real: int,
    ) -> JudgedSite:
        """Return the ``judged`` tokens of both ``sides``; ``real`` counts those of the site."""
        left, right = sides
        chosen = judged.flatten()
        routed = self.routing.experts(pair.site)
        # Of a dump no more is known of the dtype it was computed in than what it holds.
        own = pair.candidate
        dtype = own.source.manifest.dtype if own.source.proved else own.record.dtype
        reference = by_token(wide.values, pair.golden.record.axes)
        tokens = torch.nonzero(chosen).flatten()
        # A copy by index takes half the time of one by mask, and less.
        ours, theirs, wider = (
            each.reshape(chosen.numel(), -1).index_select(0, tokens)
            for each in (left, right, reference)
        )
        # How far single tokens of right chains scatter, no golden shows.
        chained = wide.feed == CHAINED
        return JudgedSite(
            candidate=theirs,
            golden=ours,
            reference=wider,
            tokens=tokens,
            real=real,
            layout=self.layout(pair),
            floor=replace(wide.floor, weighed=None) if chained else wide.floor,
            clean=wide.clean,
            typical=wide.typical,
            epsilon=torch.finfo(getattr(torch, dtype)).eps,
            experts=None if routed is None else routed.flatten(0, 1)[chosen],
        )
