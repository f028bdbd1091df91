"""Align: for every site that was asked for, which two records meet there, or why none do.

A plan from manifests alone: no tensor is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import EMBEDDING, HEAD, NORM, PREFILL, TOKENS, Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.fingerprints import differs_at
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.judge.stages import CHAIN, computed_at, is_feed, scores_of, stage_of
from layerparity.record.manifest import Manifest, Record
from layerparity.record.reason import Reason, ReasonKind, UnlikeError
from layerparity.record.stored_run import is_transformers
from layerparity.record.verdict import Outcome, Row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pair:
    """Two records of one site that are to be judged as ``kind``."""

    site: Site
    kind: Kind
    golden: SideRecord
    candidate: SideRecord

    @property
    def last(self) -> bool:
        """Whether the candidate has a prompt's last logits alone, as compiled models give out."""
        return last_alone(self.golden.record, self.candidate.record)

    def mask(self) -> torch.Tensor | None:
        """Return which tokens are real, bool [batch, token]; None for all.

        The golden's attention mask, else the candidate's. A decode step has no padding. Raises
        UserError where it cannot be read.
        """
        if self.site.phase != PREFILL:
            return None
        mask = self.golden.source.mask
        mask = self.candidate.source.mask if mask is None else mask
        return mask if mask is None else self.cut(mask)

    def positions(self) -> torch.Tensor | None:
        """Return where each token stands in its prompt, int64 [batch, token]; None: not said."""
        return None if self.site.phase != PREFILL else self.golden.source.positions

    def cut(self, golden: torch.Tensor) -> torch.Tensor:
        """Return what the candidate has of the golden's tokens, [batch, token, ...] of any dtype.

        A prompt ends with its last token: padding comes first.
        """
        return golden[:, -1:] if self.last else golden


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
    captured or skipped. Raises UserError where they share no site, UnlikeError where none of those
    that they share can be compared.
    """
    pairs: list[Pair] = []
    settled: list[Row] = []
    refusals: list[Reason] = []
    stages = candidate.manifests
    covered = {site for site in golden.records if any(stage_of(each, site) for each in stages)}
    skipped = {Site.parse(text) for text in candidate.skipped}
    for site in blocks.sorted(covered | set(candidate.records) | skipped):
        left, right = golden.records.get(site), candidate.records.get(site)
        if right is None and left is not None and site not in skipped and _is_extra(left, stages):
            continue
        if left is None or right is None:
            settled.append(_absent(site, golden, candidate))
            continue
        unfed = _unfed(left)
        if unfed is not None:
            settled.append(Row(site, left.record.kind, Outcome.SKIPPED, why=unfed))
            continue
        left, right = _alike_embedded(_adopt(left, right), _adopt(right, left))
        differing = differs_at(left, right, golden)
        refusals += [differing] if differing else []
        misfit = differing or _misfit(left, right)
        if misfit:
            wrong = misfit.kind is ReasonKind.OTHER_SIZE
            outcome = Outcome.FAIL if wrong else Outcome.INCONCLUSIVE
            settled.append(Row(site, left.record.kind, outcome, why=misfit))
        else:
            pairs.append(Pair(site, _kind(left, right, golden), left, right))
    shared = golden.records.keys() & candidate.records.keys()
    if not shared or (refusals and not pairs):
        raise _nothing(golden, candidate, refusals)
    return Alignment(pairs, settled, blocks)


def _is_extra(golden: SideRecord, candidates: list[Manifest]) -> bool:
    """Say whether a golden of a candidate's own values holds what that never recorded.

    It is what tells of other sites: the router's choices, and what a block adds to its stream.
    """
    site, manifest = golden.record.site, golden.source.manifest
    if site.layer is None or not site.component or not manifest.values_of:
        return False
    return _not_asked(site, manifest, candidates) is not None


def _absent(site: Site, golden: RunSet, candidate: RunSet) -> Row:
    """Return the row of a site that one side lacks."""
    left, right = golden.records.get(site), candidate.records.get(site)
    if right is not None:
        unrun = _unrun(site, golden)
        if unrun:
            return Row(site, right.record.kind, Outcome.INCONCLUSIVE, why=unrun)
        text = golden.skipped.get(str(site), "")
        why = Reason(ReasonKind.NOT_CAPTURED_BY_GOLDEN)
        if text:
            why = Reason(ReasonKind.SKIPPED_BY_GOLDEN, {"text": text})
        return Row(site, right.record.kind, Outcome.SKIPPED, why=why)
    skipped = candidate.skipped.get(str(site))
    kind = left.record.kind if left else Kind.REAL
    if skipped:
        return Row(site, kind, Outcome.SKIPPED, why=Reason(ReasonKind.SKIPPED, {"text": skipped}))
    if skipped is not None or left is None:
        return Row(site, kind, Outcome.SKIPPED, why=Reason(ReasonKind.NOT_CAPTURED))
    sides = left.source.manifest, candidate.manifests
    not_due = _not_asked(site, *sides) or _measured_alone(site, *sides)
    if not_due:
        return Row(site, kind, Outcome.SKIPPED, why=not_due)
    return Row(site, kind, Outcome.MISSING, why=Reason(ReasonKind.LOST))


def _measured_alone(site: Site, golden: Manifest, candidates: list[Manifest]) -> Reason | None:
    """Return that only transformers' modules are known to have a site, which a port lacks, or None.

    What a family's table names, a port shows or gives a reason for; what was measured of modules
    beside it, its author cannot know. What it shows in any block, it knows.
    """
    covering = [each for each in candidates if stage_of(each, site)]
    family = family_of(golden.model.model_type)
    due = family.complete or not site.component or site.layer is None
    due = due or site.local in {tap.local for tap in family.taps}
    due = due or any(is_transformers(each.port) for each in covering)
    shown = (record.site.local for each in covering for record in each.records)
    return None if due or site.local in shown else Reason(ReasonKind.NOT_SHOWN)


def _unfed(golden: SideRecord) -> Reason | None:
    """Return that a golden of a candidate's own values computed a site from its own, or None.

    So it does behind the blocks, where the candidate recorded nothing that the stage is fed.
    """
    manifest, site = golden.source.manifest, golden.record.site
    if site.path == TOKENS:
        # The next token is chosen from the logits.
        site = scores_of(site)
    if not manifest.values_of or site.path not in (NORM, HEAD) or site.end == "in":
        return None
    feeds = manifest.feeds_of(*site.pass_step)
    own = next((f.site for f in feeds if f.stage == site.path and f.source == CHAIN), None)
    values = {"site": str(own), "stage": site.path}
    return None if own is None else Reason(ReasonKind.NOT_FED, values)


def _unrun(site: Site, golden: RunSet) -> Reason | None:
    """Return what the golden never ran of a site the candidate was asked for; None for nothing.

    A site that only the candidate captured is no loss; a block or a step that has no golden is
    one, unless the golden is a dump, which is what somebody happened to have.
    """
    if not golden.proved:
        return None
    covering = [each for each in golden.manifests if stage_of(each, site)]
    return _unrun_step("golden", site, covering) if covering else Reason(ReasonKind.NOT_RUN)


def _not_asked(site: Site, golden: Manifest, candidates: list[Manifest]) -> Reason | None:
    """Return why the candidate was never asked for a site within its stages, or None."""
    covering = [manifest for manifest in candidates if stage_of(manifest, site)]
    unrun = _unrun_step("candidate", site, covering)
    if unrun:
        return unrun
    local = site.local if site.layer is not None else str(site)
    # A run's own patterns may want the site, whatever the golden's are.
    asked = any(each.capture(layer=site.layer, local=local) for each in covering)
    if not covering or asked or covering[-1].capture == golden.capture:
        return None
    capture = covering[-1].capture
    # The name says enough, unless both have it.
    shown = str(capture) if capture.name == golden.capture.name else capture.name
    return Reason(ReasonKind.NOT_ASKED_FOR, {"capture": shown})


def _unrun_step(side: str, site: Site, covering: list[Manifest]) -> Reason | None:
    """Return that some runs of a side hold records, and none of a site's step; else None."""
    ran = [each.recorded_passes for each in covering]
    if not any(ran) or any(site.pass_step in each for each in ran):
        return None
    return Reason(ReasonKind.NO_STEP, {"side": side, "phase": site.phase, "step": site.step})


def _adopt(own: SideRecord, other: SideRecord) -> SideRecord:
    """Return a dump's record with the axes and kind of the other side's run; a run's as it is.

    Of a dump only shape and dtype are known. One without an axis of sequences is a batch of one
    where the other side is.
    """
    if own.source.proved:
        return own
    record, theirs = own.record, other.record
    alone = theirs.axes[:1] == ("batch",) and theirs.shape[:1] == (1,)
    if alone and len(theirs.shape) == len(record.shape) + 1:
        record = replace(record, shape=(1, *record.shape), axes=theirs.axes)
    if other.source.proved and len(record.shape) == len(theirs.shape):
        record = replace(record, axes=theirs.axes, kind=theirs.kind)
    return SideRecord(own.source, record)


def _alike_embedded(left: SideRecord, right: SideRecord) -> tuple[SideRecord, SideRecord]:
    """Return both records of what an embedding gives out, real or exact as transformers has it.

    Some models scale the rows that it copies, which no other port, and no dump, can tell a run.
    """
    kinds = {left.record.kind, right.record.kind}
    if (left.record.site.path, left.record.site.end) != (EMBEDDING, "out") or kinds != {
        Kind.REAL,
        Kind.EXACT,
    }:
        return left, right
    ours, theirs = (is_transformers(each.source.manifest.port) for each in (left, right))
    kind = (right if theirs and not ours else left).record.kind
    known = [SideRecord(each.source, replace(each.record, kind=kind)) for each in (left, right)]
    return known[0], known[1]


def last_alone(golden: Record, candidate: Record) -> bool:
    """Say whether a candidate's logits of a prefill are those of the last tokens alone."""
    head = golden.site == Site(HEAD, "out") and golden.axes == candidate.axes
    if not head or golden.axes[:2] != ("batch", "token") or len(candidate.shape) != 3:
        return False
    batch, tokens, *rest = golden.shape
    return tokens > 1 and (batch, 1, *rest) == candidate.shape


def _misfit(golden: SideRecord, candidate: SideRecord) -> Reason | None:
    """Return why two records of one site cannot be laid on each other, or None."""
    left, right = golden.record, candidate.record
    dtypes = {"golden": left.dtype, "candidate": right.dtype}
    whole = [side for side, dtype in dtypes.items() if "float" not in dtype]
    if whole and Kind.REAL in (left.kind, right.kind):
        if whole[1:]:
            return Reason(ReasonKind.INTEGERS_TWICE, dtypes)
        return Reason(ReasonKind.INTEGERS, {"side": whole[0], "dtype": dtypes[whole[0]]})
    if left.shape != right.shape and not last_alone(left, right):
        return _other_shape(left, right)
    if left.axes != right.axes:
        return Reason(ReasonKind.AXES, {"golden": list(left.axes), "candidate": list(right.axes)})
    if left.kind != right.kind:
        values = {"golden": left.kind.value, "candidate": right.kind.value}
        return Reason(ReasonKind.KIND, values)
    return None


def _other_shape(left: Record, right: Record) -> Reason:
    """Return that two shapes differ, and what the difference looks like.

    How many sequences and tokens there are, inputs and padding decide; any other size is the
    model's.
    """
    shapes = {"golden": list(left.shape), "candidate": list(right.shape)}
    for side, shape in shapes.items():
        if prod(shape) <= 1:
            kind = ReasonKind.ONE_ELEMENT if prod(shape) else ReasonKind.EMPTY
            return Reason(kind, {**shapes, "side": side})
    if sorted(left.shape) == sorted(right.shape):
        return Reason(ReasonKind.TRANSPOSED, shapes)
    if left.axes == right.axes and len(left.axes) == len(left.shape) == len(right.shape):
        sizes = zip(left.axes, left.shape, right.shape, strict=True)
        axes = [axis for axis, a, b in sizes if a != b and axis not in ("batch", "token")]
        if axes:
            return Reason(ReasonKind.OTHER_SIZE, {**shapes, "axes": axes})
    if len(left.shape) == len(right.shape):
        larger = [a >= b for a, b in zip(left.shape, right.shape, strict=True)]
        smaller = [a <= b for a, b in zip(left.shape, right.shape, strict=True)]
        if all(larger) or all(smaller):
            return Reason(ReasonKind.PADDED, shapes)
    return Reason(ReasonKind.SHAPE, shapes)


def _kind(golden: SideRecord, candidate: SideRecord, goldens: RunSet) -> Kind:
    """Return what the numbers of a site mean: a run's input that was fed or copied is exact.

    ``goldens`` are all runs of the golden's side.
    """
    if not candidate.source.proved or golden.record.kind is not Kind.REAL:
        return golden.record.kind
    manifest, site = candidate.source.manifest, candidate.record.site
    # What a golden was fed of a candidate's own values is the candidate's, bit by bit.
    left = golden.source.manifest
    own = bool(left.values_of) and site.end == "in" and is_feed(left, site)
    if own or is_feed(manifest, site):
        return Kind.EXACT
    computed = computed_at(manifest, site)
    if computed.path != EMBEDDING or computed == site:
        return Kind.REAL
    # What a block takes from the embedding are copied rows, unless the model scales them.
    copied, theirs = goldens.records.get(computed), manifest.record(computed)
    if copied is not None and theirs is not None:
        copied, _ = _alike_embedded(copied, SideRecord(candidate.source, theirs))
    return copied.record.kind if copied is not None else Kind.EXACT


def _nothing(golden: RunSet, candidate: RunSet, refusals: list[Reason]) -> UserError:
    """Return the error of two sides of which no site can be compared."""
    left, right = golden.sources[0].run.name, candidate.sources[0].run.name
    if refusals:
        return UnlikeError(left, right, refusals)
    return UserError(f"'{left}' and '{right}' share no site: give runs whose scopes overlap.")
