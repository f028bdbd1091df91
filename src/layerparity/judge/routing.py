"""Routing: at which tokens both sides chose alike, and whether where they did not was a tie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from layerparity.anatomy.site import PREFILL, Place, Site
from layerparity.judge.references import SiteReference
from layerparity.judge.rows import by_token
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.numbers.metrics.sets import sets_agree

CHOICES = "choices"
# What a block computes after its router, and so differs wherever an expert set does.
_BEHIND = ("mlp.gate:weights", "mlp.experts:out", "mlp:out", ":out")
# Two scores, each off by the noise of both sides: a gap of more standard errors is no tie.
TIE = 8.0


@dataclass
class Routing:
    """The expert choices of two sides, by block."""

    golden: RunSet
    candidate: RunSet

    def agreeing(self, site: Site) -> torch.Tensor | None:
        """Return bool [batch, token], true where both chose the same experts before a site.

        None where the site stands before its block's router, or nothing is known of one.
        """
        if site.layer is None or site.local not in _BEHIND:
            return None
        choices = self._pair(site.layer, site)
        return None if choices is None else sets_agree(*choices)

    def untouched(self, site: Site) -> torch.Tensor | None:
        """Return bool [batch, token]: no token up to there was routed apart in an earlier block."""
        layers = [each.layer for each in self.golden.records if each.layer is not None]
        before = site.layer if site.layer is not None else max(layers, default=-1) + 1
        touched: torch.Tensor | None = None
        for layer in range(before):
            choices = self._pair(layer, site)
            if choices is not None:
                # Later tokens of a sequence attend to one that was routed apart.
                apart = (~sets_agree(*choices)).cumsum(-1) > 0
                touched = apart if touched is None else touched | apart
        return None if touched is None else ~touched

    def experts(self, site: Site) -> torch.Tensor | None:
        """Return which experts the golden sent each token to, bool [batch, token, experts]."""
        if site.layer is None or site.local not in _BEHIND[1:3]:
            return None
        choices = self.golden.records.get(_choices(site.layer, site))
        if choices is None:
            return None
        chosen = _load(choices).long()
        return torch.zeros(*chosen.shape[:-1], int(chosen.max()) + 1, dtype=torch.bool).scatter_(
            -1, chosen, value=True
        )

    def _pair(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both sides' own choices in a site's pass, [batch, token, k], if both have them."""
        choices = _choices(layer, site)
        left, right = self.golden.records.get(choices), self.candidate.records.get(choices)
        if left is None or right is None or left.record.shape != right.record.shape:
            return None
        if replayed(right):
            return None
        return _load(left), _load(right)


def replayed(choices: SideRecord) -> bool:
    """Say whether a run computed with the golden's choices, and only shows its own."""
    return bool(choices.source.manifest.numerics.get("replay"))


def flips(
    golden: torch.Tensor, candidate: torch.Tensor, scores: SiteReference, mask: torch.Tensor
) -> dict[str, float]:
    """Return how many tokens chose otherwise, and how many of them not for noise.

    ``golden`` and ``candidate`` are int64 [tokens, k]; ``scores`` what the reference chose from,
    [tokens, choices]; ``mask`` bool [tokens]. A flip is noise where every expert that was given up
    for another stood within `TIE` standard errors of it in the reference.
    """
    wide = scores.values.double().reshape(mask.numel(), -1)
    floors = scores.floor.tokens.double().amax(0)
    if scores.typical is not None:
        typical = scores.typical.of_tokens(wide.square().sum(1))
        freedom = min(scores.typical.freedom, wide.shape[-1])
        floors = scores.typical.raised_to_typical(floors, typical, freedom)
    noise = (floors / wide.shape[-1]).sqrt()
    noise = torch.maximum(noise, noise[mask].mean())
    apart = ~sets_agree(golden, candidate) & mask
    margin, outside = math.inf, 0
    for token in torch.nonzero(apart).flatten().tolist():
        gap = _gap(golden[token], candidate[token], wide[token])
        margin = min(margin, gap)
        outside += int(gap > TIE * float(noise[token]))
    metrics = {"flips": float(apart.sum()), "flips_outside_noise": float(outside)}
    return metrics | ({"tie_margin": margin} if math.isfinite(margin) else {})


def _gap(golden: torch.Tensor, candidate: torch.Tensor, scores: torch.Tensor) -> float:
    """Return the largest score given up for a smaller one: best of the lost - worst of the new."""
    left, right = set(golden.tolist()), set(candidate.tolist())
    lost, new = list(left - right), list(right - left)
    if not lost or not new or max(new) >= scores.numel():
        return math.inf
    return float(scores[lost].max() - scores[new].min())


def scores_of(site: Site) -> Site:
    """Return the site whose reference holds the scores that a choice was made from."""
    if site.path == "tokens":
        step = (PREFILL, 0) if site.step == 0 else (site.phase, site.step)
        return Site("lm_head", "out", *step)
    return Site(site.path, "scores", site.phase, site.step)


def _choices(layer: int, site: Site) -> Site:
    return Site(str(Place(layer, "mlp.gate")), CHOICES, site.phase, site.step)


def _load(own: SideRecord) -> torch.Tensor:
    return by_token(own.source.load(own.record), own.record.axes)
