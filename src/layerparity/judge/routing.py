"""Routing: at which tokens both sides chose alike, and whether where they did not was a tie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import CHOICES, PREFILL, Kind, Place, Site
from layerparity.judge.references import References
from layerparity.judge.rows import by_token, real_tokens
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.judge.stages import scores_of
from layerparity.judge.ties import Supposed, may_be_apart, stands_out, ties_explain
from layerparity.numbers.metrics.sets import sets_agree
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.references import CHAINED
from layerparity.record.verdict import DECIDED, Outcome, Row

# What depends on each token's experts one by one, and not on those of tokens before it.
_BY_EXPERT = ("mlp.experts:out", "mlp:out")


@dataclass
class Routing:
    """What was chosen inside the blocks of two sides: experts by a router, tokens by attention."""

    golden: RunSet
    candidate: RunSet
    blocks: Blocks
    references: References
    _choices: dict[tuple[int, tuple[str, int]], list[Site]] = field(init=False)
    _seen: dict[Site, torch.Tensor | None] = field(init=False)
    _untouched: dict[tuple[int, tuple[str, int]], torch.Tensor | None] = field(init=False)
    # By site, at how many tokens what was computed there says that others were chosen.
    supposed: dict[Site, int] = field(init=False)
    _real: dict[tuple[int, tuple[str, int]], list[Site]] = field(init=False)
    _layers: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._choices, self._seen, self._untouched, self.supposed = {}, {}, {}, {}
        self._real = {}
        for site, own in self.golden.records.items():
            if site.layer is None:
                continue
            self._layers = max(self._layers, site.layer + 1)
            at = (site.layer, site.pass_step)
            if own.record.kind is Kind.INDEX_SET:
                self._choices.setdefault(at, []).append(site)
            elif own.record.kind is Kind.REAL:
                self._real.setdefault(at, []).append(site)

    def agreeing(self, site: Site) -> torch.Tensor | None:
        """Return bool [batch, token]: both chose the same wherever a site's block did before it.

        None where the site stands before every choice of its block, or nothing is known of one.
        """
        if site.layer is None:
            return None
        choices = self._choices.get((site.layer, site.pass_step), [])
        block = self.blocks.block(site.layer, [each.local for each in (site, *choices)])
        before = [each for each in choices if block.is_from(site.local, each.local)]
        return _none_of([self._kept(each, self._apart(each)) for each in before])

    def untouched(self, site: Site) -> torch.Tensor | None:
        """Return bool [batch, token]: no token up to there was routed apart in an earlier block."""
        before = site.layer if site.layer is not None else self._layers
        key = (before, site.pass_step)
        if key not in self._untouched:
            earlier = [self._choices.get((layer, site.pass_step), []) for layer in range(before)]
            choices = [each for of_layer in earlier for each in of_layer]
            apart = {each: self._apart(each) for each in choices}
            # Later tokens of a sequence attend to one that was routed apart, kept or not.
            touched = [
                self._kept(each, found.cumsum(-1) > 0)
                for each, found in apart.items()
                if found is not None
            ]
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

        All tokens of a prompt are there, also of those that kept some. Where the candidate shows no
        choices, it is where it may have; None where nothing says so,
        where it computed with the golden's, or they chose different numbers.
        """
        if choices not in self._seen:
            left, right = self.golden.records[choices], self.candidate.records.get(choices)
            self._seen[choices] = None
            if right is None:
                self._suppose(choices)
            elif (
                not replayed(right)
                and not left.source.manifest.values_of
                and left.record.shape == right.record.shape
            ):
                self._seen[choices] = _apart(left, right)
        return self._seen[choices]

    def _kept(self, choices: Site, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return a mask of all tokens, bool [batch, token], at those that the golden kept."""
        kept = self.golden.records[choices].source.manifest.kept
        whole = mask is None or choices.phase != PREFILL
        return mask if whole or mask is None else kept.of(mask)

    def _of_all(self, own: SideRecord, mask: torch.Tensor) -> torch.Tensor:
        """Return a mask of kept tokens, bool [batch, token], as one of all tokens.

        Of the others nobody can say: they count as routed apart.
        """
        kept = own.source.manifest.kept
        if not kept or own.record.site.phase != PREFILL:
            return mask
        every = mask.new_ones(mask.shape[0], kept.width)
        every[:, list(kept.columns)] = mask
        return every

    def _suppose(self, choices: Site) -> None:
        """Note where the candidate may have chosen otherwise, in all passes that show no choices.

        All decode steps together are one sample, as one token of each is none.
        """
        alike = [
            site
            for (layer, _), sites in self._choices.items()
            for site in sites
            if layer == choices.layer and _across_steps(site) == _across_steps(choices)
        ]
        found = {
            site: self._may_be_apart(self.golden.records[site])
            for site in alike
            if site not in self.candidate.records
        }
        known = {site: both for site, both in found.items() if both is not None}
        explained = ties_explain(supposed for _, supposed in known.values())
        for site in found:
            self._seen[site] = None
        for site, (shown, supposed) in known.items():
            tokens = supposed.tokens if explained else torch.zeros_like(supposed.tokens)
            self.supposed[shown] = int(tokens.sum())
            own = self.golden.records[site]
            self._seen[site] = self._of_all(own, tokens.view(own.record.shape[:2]))

    def _may_be_apart(self, left: SideRecord) -> tuple[Site, Supposed] | None:
        """Return where the candidate may have chosen otherwise than ``left``, and who shows that.

        What it computed first from its choices says so; None where it shows nothing of that, or
        nothing says how far rounding goes.
        """
        choices = left.record.site
        shown = self._first_after(choices)
        if shown is None or replayed(shown[1]):
            return None
        own, theirs = shown
        scores, groups, wide = (
            self.references.at(site, own.source, theirs.source)
            for site in (
                scores_of(choices),
                replace(choices, end="group_scores"),
                own.record.site,
            )
        )
        if isinstance(scores, Reason) or isinstance(wide, Reason):
            return None
        chosen = _load(left).long()
        values = _load(theirs)
        mask = own.source.mask if choices.phase == PREFILL else None
        asked = real_tokens(values, mask)
        before = self.untouched(choices) if wide.feed == CHAINED else None
        if chosen.shape[:2] != values.shape[:2] or asked.shape != values.shape[:2]:
            return None
        asked = asked & before if before is not None else asked
        off = stands_out(values.flatten(0, 1).flatten(1), wide, theirs.epsilon)
        known = None if isinstance(groups, Reason) else groups
        supposed = may_be_apart(chosen.flatten(0, 1), off, asked.flatten(), scores, known)
        return own.record.site, supposed

    def is_supposed(self, site: Site, *, chained: bool) -> bool:
        """Say whether tokens of a site are left out for choices that nobody saw."""
        before = site.layer if site.layer is not None else self._layers
        return any(
            count and each.layer is not None and each.pass_step == site.pass_step
            for each, count in self.supposed.items()
            if each.layer == site.layer or (chained and (each.layer or 0) < before)
        )

    def _beside(self, choices: Site) -> list[Site]:
        """Return the golden's sites of real numbers in the block and pass of some choices."""
        return self._real.get((choices.layer or 0, choices.pass_step), [])

    def _first_after(self, choices: Site) -> tuple[SideRecord, SideRecord] | None:
        """Return both sides of the first site that is computed from choices and was recorded."""
        shapes = {site: self.golden.records[site].record.shape for site in self._beside(choices)}
        held = [
            site
            for site, shape in shapes.items()
            if site in self.candidate.records and self.candidate.records[site].record.shape == shape
        ]
        block = self.blocks.block(choices.layer, [each.local for each in (choices, *held)])
        after = [each for each in held if block.is_from(each.local, choices.local)]
        if not after:
            return None
        first = min(after, key=self.blocks.order)
        return self.golden.records[first], self.candidate.records[first]


def _apart(left: SideRecord, right: SideRecord) -> torch.Tensor:
    """Return bool [batch, token], true at real tokens whose sets differ; see `sets_agree`."""
    apart = ~sets_agree(
        *(by_token(each.source.whole(each.record), each.record.axes) for each in (left, right))
    )
    # Padding comes first in a sequence, and no real token attends to it.
    mask = left.source.prompt_mask if left.record.site.phase == PREFILL else None
    real = real_tokens(apart, mask)
    return apart & real if real.shape == apart.shape else apart


def _none_of(masks: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return where none of some masks of one shape is true; None of none."""
    known = [each for each in masks if each is not None]
    return ~torch.stack(known).any(0) if known else None


def replayed(choices: SideRecord) -> bool:
    """Say whether a run computed with the golden's choices, and only shows its own."""
    return bool(choices.source.manifest.numerics.get("replay"))


# Why a site has too few tokens that were routed alike.
_TOO_FEW = (
    ReasonKind.ROUTED_APART,
    ReasonKind.UNSEEN_ROUTING,
    ReasonKind.NO_SET_AGREES,
    ReasonKind.TIES,
    ReasonKind.UNSEEN_TIES,
)
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
        unseen = row.why is not None and row.why.kind is ReasonKind.UNSEEN_ROUTING
        kind = ReasonKind.UNSEEN_TIES if unseen else ReasonKind.TIES
        return replace(row, outcome=Outcome.SKIPPED, why=Reason(kind, {"share": share}))
    why = row.lacking or Reason(ReasonKind.NO_SET_AGREES)
    return replace(row, outcome=Outcome.INCONCLUSIVE, why=why)


def _load(own: SideRecord) -> torch.Tensor:
    return by_token(own.source.load(own.record), own.record.axes)
