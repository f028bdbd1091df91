"""Calibrate: measure a pair's deviation from its reference, in units of the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.judge.align import Pair
from layerparity.judge.at_the_end import CleanEnd
from layerparity.judge.references import FoundReference, References, SiteReference, golden_off
from layerparity.judge.routing import ENOUGH, Routing
from layerparity.judge.rows import by_token, has_tokens, places
from layerparity.judge.sides import RunSet
from layerparity.judge.stages import scores_of
from layerparity.judge.ties import flips
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.one_token import OneTokenSites, deviations
from layerparity.numbers.token_sums import TokenLayout, heads_of, token_layout
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.references import CHAINED
from layerparity.record.verdict import FAR_OFF, SUPPOSED


@dataclass
class Calibrated:
    """What one pair has beside its plain metrics; ``lacking`` is why there is nothing.

    ``profiles`` are float64 [group] by metric and grouping; ``end`` is there for logits alone.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, np.ndarray] = field(default_factory=dict)
    lacking: Reason | None = None
    end: CleanEnd | None = None


class Calibration:
    """The references and routing of one comparison."""

    def __init__(self, golden: RunSet, candidate: RunSet, blocks: Blocks) -> None:
        self.references = References()
        self.routing = Routing(golden, candidate, blocks, self.references)
        # Each block by its own, as its floor was measured: attention may have other heads, or none.
        shapes: dict[int | None, list[tuple[str, tuple[int, ...], tuple[str, ...]]]] = {}
        for site, own in golden.records.items():
            shape = (site.end, own.record.shape, own.record.axes)
            shapes.setdefault(site.layer, []).append(shape)
        self._heads = {layer: heads_of(each) for layer, each in shapes.items()}

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
        judged, few = self.tensors(pair, left, right, real), None
        if isinstance(judged, Reason) and judged.kind is ReasonKind.UNSEEN_ROUTING:
            # What is within its noise is right all the same; what is not may be due to routing.
            few = judged
            judged = self.tensors(pair, left, right, real, everything=True)
        if isinstance(judged, Reason):
            return Calibrated(self._beyond_narrower(pair, left, right, real), lacking=judged)
        off = deviation(judged)
        _name_position(off.metrics, judged.tokens, real, pair.positions())
        share = judged.tokens.numel() / max(judged.real, 1)
        clean = CleanEnd(judged.floor.ends, judged.tokens) if judged.floor.ends else None
        off.metrics["agreeing_tokens"] = share if few is None else few.values["share"]
        if self.routing.supposed.get(pair.site):
            off.metrics[SUPPOSED] = float(self.routing.supposed[pair.site])
        return Calibrated(off.metrics, off.profiles, few, clean)

    def of_steps(
        self, pairs: Sequence[Pair], golden: torch.Tensor, candidate: torch.Tensor
    ) -> list[Calibrated]:
        """Return what `of` does, of decode steps of one site.

        ``golden`` and ``candidate`` are floating [step, element]: one sequence's token each. Raises
        UserError where a reference is damaged.
        """
        results, real = [Calibrated() for _ in pairs], torch.ones(1, 1, dtype=torch.bool)
        together: dict[tuple[object, ...], list[tuple[int, FoundReference]]] = {}
        routed = [self.routing.experts(pair.site) for pair in pairs]
        for step, pair in enumerate(pairs):
            found = self.references.found(pair.site, pair.golden.source, pair.candidate.source)
            if isinstance(found, Reason):
                results[step].lacking = found
                continue
            if not found.entry.steps or found.dtype not in found.entry.floors:
                shape = pair.golden.record.shape
                left, right = golden[step].reshape(shape), candidate[step].reshape(shape)
                results[step] = self.of(pair, left, right, None)
                continue
            few = self._too_few(
                pair.site, self._alike(pair.site, found.feed, real), real, found.feed
            )
            lacking = few or golden_off(found.stored.golden_share(found.entry, found.dtype))
            results[step].lacking = lacking
            if lacking is None:
                sent = routed[step]
                width = None if sent is None else sent.shape[-1]
                own = (found.stored.digest, found.entry.stage, found.feed, found.entry.name())
                together.setdefault((*own, width), []).append((step, found))
        for group in together.values():
            steps = [step for step, _ in group]
            stored = [each for _, each in group]
            sites = self._of_one_token(pairs[steps[0]], stored, golden[steps], candidate[steps])
            experts = [each.flatten(0, -2) for step in steps if (each := routed[step]) is not None]
            sites.experts = torch.cat(experts) if experts else None
            for step, off in zip(steps, deviations(sites), strict=True):
                metrics = off.metrics | {"agreeing_tokens": 1.0}
                results[step] = Calibrated(metrics, off.profiles)
        return results

    def _of_one_token(
        self,
        pair: Pair,
        found: Sequence[FoundReference],
        golden: torch.Tensor,
        candidate: torch.Tensor,
    ) -> OneTokenSites:
        """Return decode steps of a pair's site, [step, element], with what they are judged by."""
        first, entries = found[0], [each.entry for each in found]
        values, tokens, elements = first.stored.steps(entries, first.dtype)
        return OneTokenSites(
            candidate=candidate,
            golden=golden,
            reference=values,
            tokens=tokens,
            elements=elements,
            layout=self.layout(pair),
            epsilon=pair.candidate.epsilon,
            typical=self.references.typical_floor(first),
        )

    def tensors(
        self,
        pair: Pair,
        golden: torch.Tensor,
        candidate: torch.Tensor,
        real: torch.Tensor,
        *,
        everything: bool = False,
    ) -> JudgedSite | Reason:
        """Return a site's judged tokens with reference and floor, or why there are none.

        ``golden`` and ``candidate`` are [batch, token, ...], ``real`` is bool [batch, token].
        ``everything`` takes tokens that were routed apart as well.
        """
        wide = self.references.of(pair)
        return self._held_against(wide, pair, (golden, candidate), real, everything=everything)

    def _held_against(
        self,
        wide: SiteReference | Reason,
        pair: Pair,
        sides: tuple[torch.Tensor, torch.Tensor],
        real: torch.Tensor,
        *,
        everything: bool = False,
    ) -> JudgedSite | Reason:
        """Return what `tensors` does, of both ``sides`` and a given reference."""
        if isinstance(wide, Reason):
            return wide
        wide = _of_last(wide, pair) if pair.last else wide
        judged = real if everything else self._alike(pair.site, wide.feed, real)
        few = self._too_few(pair.site, judged, real, wide.feed)
        if few is not None:
            return few
        return self._judged_site(pair, sides, wide, judged, int(real.sum()))

    def _beyond_narrower(
        self, pair: Pair, left: torch.Tensor, right: torch.Tensor, real: torch.Tensor
    ) -> dict[str, float]:
        """Return how far off a candidate of a wider type than the golden's is, as `FAR_OFF`.

        It is in floors of the narrower type, or in what rounding weights to it may do, where that
        is more. Empty where it is less than one, of no wider type, or nothing is known.
        """
        wide = self.references.narrower(pair)
        judged = self._held_against(wide, pair, (left, right), real) if wide else None
        if judged is None or isinstance(judged, Reason):
            return {}
        metrics = deviation(judged).metrics
        least = torch.finfo(getattr(torch, pair.golden.source.manifest.dtype)).eps / 4
        known = min(metrics["floor_rel_l2"] / least, 1.0)
        off = metrics["error_ratio"] * known if known else 0.0
        # Within one floor it tells nothing.
        return {FAR_OFF: off} if off > 1 else {}

    def layout(self, pair: Pair) -> TokenLayout:
        """Return how the elements of one token are laid out at a site."""
        record = pair.golden.record
        return token_layout(
            record.shape, record.axes, pair.site.local, self._heads.get(pair.site.layer, {})
        )

    def _choices(
        self, pair: Pair, left: torch.Tensor, right: torch.Tensor, real: torch.Tensor
    ) -> Calibrated:
        """Judge choices, [batch, token, k], by the scores they were made from.

        One that is wrong shows at any token. That none is needs most of them.
        """
        site = scores_of(pair.site)
        wide = self.references.at(site, pair.golden.source, pair.candidate.source)
        if isinstance(wide, Reason):
            return Calibrated(lacking=wide)
        # A block's scores are no site of its structure, its choices are.
        judged = self._alike(site if pair.site.layer is None else pair.site, wide.feed, real)
        if pair.site.path == "tokens":
            # The next token is chosen from the scores of each sequence's last one.
            tokens = wide.floor.tokens.unflatten(-1, (real.numel(), -1))[..., -1]
            floor = replace(wide.floor, tokens=tokens, real=None)
            wide = replace(wide, values=wide.values[:, -1:], floor=floor)
        ours, theirs = (each.reshape(real.numel(), -1).long() for each in (left, right))
        groups = self.references.at(
            replace(site, end="group_scores"), pair.golden.source, pair.candidate.source
        )
        known = None if isinstance(groups, Reason) else groups
        found = flips(ours, theirs, wide, judged.flatten(), known)
        few = (
            self._too_few(pair.site, judged, real, wide.feed)
            if not found["flips_outside_noise"]
            else None
        )
        return Calibrated(lacking=few) if few is not None else Calibrated(found)

    def _alike(self, site: Site, feed: str, real: torch.Tensor) -> torch.Tensor:
        """Return the ``real`` tokens, bool [batch, token], that only arithmetic sets apart.

        Of a site whose tensors have but the last token of a sequence, that one.
        """
        masks = [self.routing.agreeing(site)]
        if feed == CHAINED or site.local == ":in":
            masks.append(self.routing.untouched(site))
        for each in masks:
            if each is not None and each[:, -real.shape[1] :].shape == real.shape:
                real = real & each[:, -real.shape[1] :]
        return real

    def _too_few(
        self, site: Site, judged: torch.Tensor, real: torch.Tensor, feed: str
    ) -> Reason | None:
        """Return that too few of the real tokens are judged, both bool [batch, token]; or None."""
        share = float(judged.sum()) / max(float(real.sum()), 1.0)
        if share >= ENOUGH:
            return None
        kind = ReasonKind.ROUTED_APART_IN_CHAIN if feed == CHAINED else ReasonKind.ROUTED_APART
        if self.routing.is_supposed(site, chained=feed == CHAINED or site.local == ":in"):
            kind = ReasonKind.UNSEEN_ROUTING
        return Reason(kind, {"share": share})

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
        reference = by_token(wide.values, pair.golden.record.axes)
        tokens = torch.nonzero(chosen).flatten()
        ours, theirs, wider = (
            each.reshape(chosen.numel(), -1) for each in (left, right, reference)
        )
        if tokens.numel() < chosen.numel():
            # A copy by index takes half the time of one by mask, and less.
            ours, theirs, wider = (each.index_select(0, tokens) for each in (ours, theirs, wider))
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
            epsilon=pair.candidate.epsilon,
            experts=None if routed is None else routed.flatten(0, 1).index_select(0, tokens),
        )


def _of_last(wide: SiteReference, pair: Pair) -> SiteReference:
    """Return the reference of logits, [batch, token, vocabulary], at a prompt's last tokens alone.

    One token's slopes are larger than those of all: their squares, by about as many times as there
    are tokens.
    """
    mask, (batch, tokens) = pair.golden.source.mask, wide.values.shape[:2]
    times = (batch * tokens if mask is None else int(mask.sum())) / batch
    floor = replace(
        wide.floor,
        tokens=wide.floor.tokens.unflatten(-1, (batch, tokens))[..., -1],
        elements=wide.floor.elements / times,
        real=None,
        weighed=None,
        factors={},
    )
    samples = {
        name: replace(each, square=min(each.square * times, 1.0))
        for name, each in wide.clean.samples.items()
    }
    clean = replace(wide.clean, samples=samples)
    return replace(wide, values=pair.cut(wide.values), floor=floor, clean=clean)


def _name_position(
    metrics: dict[str, float],
    tokens: torch.Tensor,
    real: torch.Tensor,
    positions: torch.Tensor | None,
) -> None:
    """Say which token of its prompt the worst one is, in place of which of those judged.

    ``tokens``, int64 [judged], numbers them batch-major among the tokens of ``real``, bool [batch,
    token], whose ``positions`` in their prompts are of that shape. Of several prompts, the metric
    beside it says which.
    """
    name = "error_ratio_position"
    if f"{name}_index" in metrics:
        worst = tokens[int(metrics[f"{name}_index"])]
        ((sequence, position),) = places(worst.reshape(1), real, positions)
        metrics[f"{name}_index"] = float(position)
        if real.shape[0] > 1:
            metrics[f"{name}_sequence"] = float(sequence)
