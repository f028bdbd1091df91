"""Calibrate: a pair's deviation from its reference, in units of the noise floor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from layerparity.anatomy.site import Kind, Site
from layerparity.judge.align import Pair
from layerparity.judge.references import References, Wide
from layerparity.judge.routing import Routing, flips, scored
from layerparity.judge.rows import by_token, has_tokens
from layerparity.judge.sides import Found, RunSet
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.token_sums import TokenLayout, heads_of, token_layout
from layerparity.record.references import CHAINED

# With fewer of the tokens left, what remains is no sample of the site.
ENOUGH = 0.5


@dataclass
class Calibrated:
    """What one pair has beside its plain metrics; ``lacking`` says why there is nothing."""

    metrics: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, list[float]] = field(default_factory=dict)
    lacking: str = ""


class Calibration:
    """The references and routing of one comparison."""

    def __init__(self, golden: RunSet, candidate: RunSet) -> None:
        self.references = References()
        self.routing = Routing(golden, candidate)
        records = (found.record for found in golden.records.values())
        self._heads = heads_of((each.site.end, each.shape, each.axes) for each in records)

    def of(
        self, pair: Pair, golden: torch.Tensor, candidate: torch.Tensor, mask: torch.Tensor | None
    ) -> Calibrated:
        """Return a pair's metrics over its real tokens, ``mask`` being bool [batch, token]."""
        axes = pair.golden.record.axes
        if pair.kind not in (Kind.REAL, Kind.INDEX_SET) or not has_tokens(axes):
            return Calibrated()
        left, right = by_token(golden, axes), by_token(candidate, axes)
        real = torch.ones(left.shape[:2], dtype=torch.bool) if mask is None else mask
        if pair.kind is Kind.INDEX_SET:
            return self._choices(pair, left, right, real)
        tensors = self.tensors(pair, left, right, real)
        if isinstance(tensors, str):
            return Calibrated(lacking=tensors)
        found = deviation(tensors)
        share = tensors.tokens.numel() / max(tensors.real, 1)
        return Calibrated(found.metrics | {"agreeing_tokens": share}, found.profiles)

    def tensors(
        self, pair: Pair, golden: torch.Tensor, candidate: torch.Tensor, real: torch.Tensor
    ) -> JudgedSite | str:
        """Return a site's judged tokens with reference and floor, or why there are none.

        ``golden`` and ``candidate`` are [batch, token, ...], ``real`` is bool [batch, token].
        """
        wide = self.references.of(pair)
        if isinstance(wide, str):
            return wide
        judged = self._judged(pair.site, wide, real)
        share = float(judged.sum()) / max(float(real.sum()), 1.0)
        if share < ENOUGH:
            return _few(share, wide.feed)
        return self._tensors(pair, (golden, candidate), wide, judged, int(real.sum()))

    def layout(self, pair: Pair) -> TokenLayout:
        """Return how the elements of one token are laid out at a site."""
        record = pair.golden.record
        return token_layout(record.shape, record.axes, pair.site.local, self._heads)

    def _choices(
        self, pair: Pair, left: torch.Tensor, right: torch.Tensor, real: torch.Tensor
    ) -> Calibrated:
        site = scored(pair.site)
        wide = self.references.at(site, pair.golden.source, pair.candidate.source)
        if isinstance(wide, str):
            return Calibrated(lacking=wide)
        if pair.site.path == "tokens":
            wide = _last_token(wide, real.numel())
        ours, theirs = (each.reshape(real.numel(), -1).long() for each in (left, right))
        return Calibrated(flips(ours, theirs, wide, real.flatten()))

    def _judged(self, site: Site, wide: Wide, real: torch.Tensor) -> torch.Tensor:
        """Narrow the real tokens to those that nothing but arithmetic sets apart."""
        known = [self.routing.agreeing(site)]
        if wide.feed == CHAINED or site.local == ":in":
            known.append(self.routing.untouched(site))
        for each in known:
            real = real & each if each is not None and each.shape == real.shape else real
        return real

    def _tensors(
        self,
        pair: Pair,
        sides: tuple[torch.Tensor, torch.Tensor],
        wide: Wide,
        judged: torch.Tensor,
        real: int,
    ) -> JudgedSite:
        left, right = sides
        chosen = judged.flatten()
        routed = self.routing.experts(pair.site)
        reference = by_token(wide.values, pair.golden.record.axes)
        tokens = torch.nonzero(chosen).flatten()
        # A copy by index takes half the time of one by mask, and less.
        ours, theirs, wider = (
            each.reshape(chosen.numel(), -1).index_select(0, tokens)
            for each in (left, right, reference)
        )
        return JudgedSite(
            candidate=theirs,
            golden=ours,
            reference=wider,
            tokens=tokens,
            real=real,
            layout=self.layout(pair),
            floor=wide.floor,
            spread=wide.spread,
            typical=wide.typical,
            epsilon=torch.finfo(getattr(torch, _computed_in(pair.candidate))).eps,
            experts=None if routed is None else routed.flatten(0, 1)[chosen],
        )


def _computed_in(found: Found) -> str:
    """Return the dtype that a side computes in; of a dump no more is known than what it holds."""
    return found.source.manifest.dtype if found.source.proved else found.record.dtype


def _last_token(wide: Wide, batch: int) -> Wide:
    """Return the scores of each sequence's last token, which the next one is chosen from."""
    values = wide.values[:, -1:]
    tokens = wide.floor.tokens.unflatten(-1, (batch, -1))[..., -1]
    floor = type(wide.floor)(wide.floor.ways, tokens, wide.floor.elements, wide.floor.spread)
    return Wide(values, floor, wide.spread, wide.feed, wide.typical)


def _few(share: float, feed: str) -> str:
    also = ", or feed=isolated" if feed == CHAINED else ""
    return f"only {share:.0%} of the tokens were routed alike: use port.replay=true{also}"
