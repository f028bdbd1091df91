"""Fingerprints: which runs may be compared at all, and at which sites, and what differs if not.

A site's chain begins at the last stage that was fed from outside and passes every stage from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerparity.anatomy.site import Site, overlap
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.judge.sides import RunSet, SideRecord, same_bytes
from layerparity.judge.stages import chain_to, is_feed, stage_of
from layerparity.judge.weights import weights_differ
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.manifest import Feed, Manifest
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.source import Source
from layerparity.record.stored_run import StoredRun

# How much of an experiment was generated.
_NO_FLAGS = ("max_new_tokens",)


def refuse_strangers(golden: RunSet, candidate: RunSet) -> None:
    """Raise UserError unless all runs are of one model and one set of inputs, and no run is both.

    A golden that was fed a candidate's own values judges no other.

    Inputs are compared by name (token ids, attention mask, position ids), as far as both have them.
    """
    folders = {_folder(source.run) for source in golden.sources}
    both = [each.run.name for each in candidate.sources if _folder(each.run) in folders]
    if both:
        raise UserError(
            f"Run '{both[0]}' is on both sides, and a run compared with itself proves nothing: "
            "give another as golden= or candidate=."
        )
    proved = [source for side in (golden, candidate) for source in side.sources if source.proved]
    for other in proved[1:]:
        differing = _strange(proved[0].manifest, other.manifest)
        if differing:
            raise UserError(
                f"'{proved[0].run.name}' and '{other.run.name}' cannot be compared: "
                f"{differing}. Make both from one model and one set of inputs."
            )
    judged = {each for manifest in golden.manifests for each in manifest.values_of}
    strange = next((s.run for s in candidate.sources if s.manifest.content not in judged), None)
    if judged and strange is not None:
        raise UserError(
            f"'{golden.sources[0].run.name}' was fed another candidate's own values, and judges "
            f"that one alone: for '{strange.name}' use {program()} job=compare "
            f"job.own_inputs=true candidate={strange.reference}."
        )


def differs_at(golden: SideRecord, candidate: SideRecord, goldens: RunSet) -> Reason | None:
    """Return what of the inputs or weights behind a candidate's record differs from the golden's.

    None where the golden's own chain of stages starts at the values that the candidate's was fed,
    and every stage since then had the same weights; or where a side is a dump, of which nothing is
    known.
    """
    if not (golden.source.proved and candidate.source.proved):
        return None
    if golden.source.manifest.values_of:
        # Each of its values was computed from the candidate's own.
        stage = stage_of(candidate.source.manifest, candidate.record.site)
        return weights_differ(golden.source, candidate.source, stage) if stage else None
    feed, passed = chain_to(candidate.source.manifest, candidate.record.site)
    if feed is None:
        return Reason(ReasonKind.FEED_UNKNOWN, {"stage": passed[0]})
    return chain_differs(feed, passed, golden, goldens, candidate.source)


def same_experiment(golden: RunSet, candidate: RunSet) -> list[Caution]:
    """Return a caution where nothing that decides numbers differs between the sides.

    If they observe other sites, and what both show is not equal to the bit, it is that.
    """
    if not (golden.proved and candidate.proved):
        return []
    left, right = ({each.fingerprint for each in side.manifests} for side in (golden, candidate))
    # A golden's fingerprint is never a candidate's: what else is in it is looked at one by one.
    alike = {_experiment(source) for side in (golden, candidate) for source in side.sources}
    if left != right and (len(alike) > 1 or None in alike):
        return []
    captures = [[each.capture for each in side.manifests] for side in (golden, candidate)]
    apart = [
        site
        for site, own in golden.records.items()
        if site in candidate.records and not same_bytes(own, candidate.records[site])
    ]
    if apart and captures[0] != captures[1]:
        values = {"site": str(apart[0]), "count": len(apart)}
        return [Caution(CautionKind.OBSERVING_CHANGES, values=values)]
    first = golden.manifests[0]
    values = {name: getattr(first, name) for name in ("backend", "device", "port", "dtype")}
    return [Caution(CautionKind.SAME_EXPERIMENT, values=values)]


def _folder(run: StoredRun) -> tuple[Path, Path | None]:
    # One folder of dumps may hold both sides, under two name maps.
    # All files of a run that a server has would be fetched to say where they lie.
    remote = run.locate_tensor is not None
    return Path(run.id) if remote else Path(run.folder).resolve(), run.names


def _experiment(source: Source) -> str | None:
    """Return how a run was made, with which versions of the code; None where that is not known."""
    tags, manifest = source.run.tags, source.manifest
    versions = {k: v for k, v in tags.items() if k == "git_commit" or k.startswith("version.")}
    if not versions:
        return None
    # A block that is fed by hand is the same block: the feed makes no other experiment.
    names = ("backend", "device", "port", "dtype")
    flags = {k: v for k, v in manifest.numerics.items() if k not in _NO_FLAGS}
    facts = {**versions, **flags, **{name: getattr(manifest, name) for name in names}}
    return json.dumps(facts, sort_keys=True)


def _strange(left: Manifest, right: Manifest) -> str:
    """Return what of model or inputs differs between two runs, or nothing."""
    if left.model.model_type != right.model.model_type:
        return f"model ({left.model.model_type} against {right.model.model_type})"
    if left.model.config_digest != right.model.config_digest:
        return f"model configuration ({left.model.name} against {right.model.name})"
    shared = sorted(set(left.inputs) & set(right.inputs))
    names = [name for name in shared if left.inputs[name] != right.inputs[name]]
    return f"inputs ({', '.join(names)})" if names else ""


def chain_differs(
    start: Feed, passed: Sequence[str], end: SideRecord, goldens: RunSet, candidate: Source
) -> Reason | None:
    """Return what differs between a golden's chain to ``end`` and a candidate's; or None.

    The candidate's began with ``start`` and passed the stages ``passed``. The golden's must hold
    the same values there and have passed the same stages, with the same weights. Where a golden
    stage was fed from outside, its chain goes on in whichever golden computed those very values.
    """
    fed, own = chain_to(end.source.manifest, end.record.site)
    # Where this golden's own chain takes in what the candidate's began with.
    first = next((n for n, stage in enumerate(own) if overlap(stage, passed[0])), None)
    value = end.source.manifest.hash_at(start.site)
    if first is not None and value is not None:
        if value != start.digest:
            values = {"site": str(start.site), "golden": value, "candidate": start.digest}
            return Reason(ReasonKind.OTHER_FEED, values)
        return _stages_differ(own[first:], passed, end.source, candidate)
    if fed is None:
        values = {"site": str(start.site), "stage": start.stage}
        return Reason(ReasonKind.FEED_NOT_HELD, values)
    # It begins later than the candidate's: from that stage on both passed the same ones.
    place = next((n for n, stage in enumerate(passed) if overlap(stage, fed.stage)), 0)
    later = _stages_differ(own, passed[place:], end.source, candidate)
    # Before it another golden has to tell; fed inside a stage, also of that one.
    cut = place + (fed.stage != passed[place])
    tried = [
        chain_differs(start, passed[:cut], computed, goldens, candidate) or later
        for computed in _origins(fed, passed[place - 1] if cut == place else "", end, goldens)
        if cut
    ]
    if None in tried:
        return None
    return tried[0] if tried else _other_start(start, fed)


def _origins(fed: Feed, before: str, end: SideRecord, goldens: RunSet) -> Iterator[SideRecord]:
    """Yield where goldens computed what a stage was fed: at the output of the stage before it.

    Without one, as for a component, at the very site it was fed from.
    """
    site = Site(before, "out", fed.site.phase, fed.site.step) if before else fed.site
    # Forward order: a chain that is followed back comes to an end.
    if not site < end.record.site:
        return
    for source in dict.fromkeys((end.source, *reversed(goldens.sources))):
        record = source.manifest.record(site)
        if record and record.digest == fed.digest and not is_feed(source.manifest, site):
            yield SideRecord(source, record)


def _stages_differ(
    own: Sequence[str], passed: Sequence[str], golden: Source, candidate: Source
) -> Reason | None:
    """Return which stage, or whose weights, a golden's chain and a candidate's do not share."""
    for ours, theirs in zip(own, passed, strict=False):
        if not overlap(ours, theirs):
            return Reason(ReasonKind.OTHER_STAGE, {"golden": ours, "candidate": theirs})
        differing = weights_differ(golden, candidate, theirs)
        if differing:
            return differing
    if len(own) == len(passed):
        return None
    longer, extra = ("golden", own) if len(own) > len(passed) else ("candidate", passed)
    values = {"side": longer, "stage": extra[min(len(own), len(passed))]}
    return Reason(ReasonKind.EXTRA_STAGE, values)


def _other_start(start: Feed, fed: Feed) -> Reason:
    """Return that the candidate's chain begins with ``start``, and the golden's with ``fed``."""
    values = {
        "golden_site": str(fed.site),
        "golden": fed.digest,
        "stage": fed.stage,
        "candidate_site": str(start.site),
        "candidate": start.digest,
    }
    return Reason(ReasonKind.OTHER_START, values)
