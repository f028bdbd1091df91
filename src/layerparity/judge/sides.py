"""Sides: the runs that stand together as golden or as candidate, seen as one set of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.ground.profile import RunProfile, StageProfile
from layerparity.judge.dumps import open_dump
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.manifest import Manifest, Record, scope_text
from layerparity.record.side import RunOrigin, Side
from layerparity.record.source import RunSource, Source
from layerparity.record.stored_run import StoredRun
from layerparity.settings.command_keys import settings_of


class SideRecord(NamedTuple):
    """A record, and the run or dump that holds it."""

    source: Source
    record: Record

    @property
    def epsilon(self) -> float:
        """The epsilon of the floating type that it was computed in."""
        import torch

        # Of a dump no more is known of that than what it holds.
        dtype = self.source.manifest.dtype if self.source.proved else self.record.dtype
        return torch.finfo(getattr(torch, dtype)).eps


def same_bytes(left: SideRecord, right: SideRecord) -> bool:
    """Say whether two records hold the same bytes; read are tensors of which one is cut alone."""
    one, other = (each.source.stored(each.record) for each in (left, right))
    if one.shape == other.shape or left.record.shape != right.record.shape:
        return (one.digest, one.dtype) == (other.digest, other.dtype)
    tensors = [each.source.load(each.record) for each in (left, right)]
    return one.dtype == other.dtype and tensors[0].equal(tensors[1])


class RunSet:
    """The union of several runs' records by site; of a site held twice, the last run's counts.

    Sources stand oldest first. ``cautions`` say what was decided between them.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.records: dict[Site, SideRecord] = {}
        self.cautions = [each for source in sources for each in source.cautions]
        self.profile, damaged = side_profile(self.sources)
        self.cautions += damaged
        doubled: dict[Site, Source] = {}
        for source in self.sources:
            for record in source.manifest.records:
                if record.site in self.records:
                    doubled[record.site] = source
                self.records[record.site] = SideRecord(source, record)
        if doubled:
            site, newest = next(iter(doubled.items()))
            values = {"count": len(doubled), "site": str(site), "run": newest.run.name}
            self.cautions.append(Caution(CautionKind.REPEATED_SITES, values=values))

    @property
    def manifests(self) -> list[Manifest]:
        """The manifests, oldest first."""
        return [source.manifest for source in self.sources]

    @property
    def num_layers(self) -> int:
        """How many blocks the model has; of dumps, as many as they name."""
        return max(manifest.model.num_layers for manifest in self.manifests)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the sources were computed in, each once; of a dump, what it holds."""
        return tuple(dict.fromkeys(each for source in self.sources for each in source.dtypes))

    @property
    def proved(self) -> bool:
        """Whether every source has fingerprints."""
        return all(source.proved for source in self.sources)

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Why no run captured a site, by the site's text."""
        reasons = {site: why for each in self.manifests for site, why in each.skipped.items()}
        captured = {str(site) for site in self.records}
        return {site: why for site, why in reasons.items() if site not in captured}

    def describe(self) -> Side:
        """Return what a report says of the side."""
        runs = [source.run for source in self.sources]
        # What names the side on a command line: its one run, else the sweep that all are of.
        sweeps = {run.parent for run in runs}
        (sweep,) = sweeps if len(sweeps) == 1 else ("",)
        scopes = [scope_text(manifest.scope) for manifest in self.manifests]
        return Side(
            name=runs[0].name if len(runs) == 1 else f"{runs[0].name} and {len(runs) - 1} more",
            url=runs[0].url,
            named=runs[0].reference if len(runs) == 1 else sweep or "",
            made=tuple(
                RunOrigin(
                    source.run.reference,
                    source.proved,
                    tuple(source.manifest.stages),
                    {} if source.manifest.elsewhere else settings_of(source.config),
                    str(source.run.names or ""),
                )
                for source in self.sources
            ),
            profile=self.profile,
            model=_distinct([manifest.model.name for manifest in self.manifests]),
            scope=scopes[0] if len(scopes) == 1 else f"{scopes[0]} ... {scopes[-1]}",
            dtypes=self.dtypes,
            feeds=tuple(dict.fromkeys(each.feed for each in self.manifests if each.feed)),
            **{
                key: _distinct([getattr(manifest, key) for manifest in self.manifests])
                for key in ("backend", "device", "port")
            },
        )


def _distinct(values: list[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def side_profile(sources: Sequence[Source]) -> tuple[RunProfile | None, list[Caution]]:
    """Return the profiles of a side's runs as one, and a caution for each that is damaged.

    None where no run keeps one: a dump's folder is not looked into.
    """
    profiles, cautions = [], []
    for source in sources:
        try:
            profile = source.folder.read_profile() if isinstance(source, RunSource) else None
        except UserError as error:
            cautions.append(Caution(CautionKind.DAMAGED_PROFILE, values={"text": str(error)}))
            continue
        if profile is not None and profile.stages:
            profiles.append(profile)
    return add_up(profiles), cautions


def add_up(profiles: Sequence[RunProfile]) -> RunProfile | None:
    """Return runs' profiles added up by stage, in the order of a forward pass; None for no run.

    Their ``before`` differ, so that of the sum is 0, and a peak is what was held above its run's.
    """
    if not profiles:
        return None
    stages: dict[str, StageProfile] = {}
    for profile in profiles:
        for stage, each in profile.stages.items():
            above = max(each.peak - profile.before, 0)
            total = stages.setdefault(stage, StageProfile())
            total += replace(each, peak=above)
    forward = sorted(stages, key=lambda stage: Site(stage, "in"))
    return RunProfile(0, {stage: stages[stage] for stage in forward})


def open_sides(
    golden: Sequence[StoredRun], candidate: Sequence[StoredRun]
) -> tuple[RunSet, RunSet]:
    """Open the runs of both sides, the candidate's of the tokens alone that the golden's kept.

    Raises UserError for none, one that is not finished, and where they kept other tokens.
    """
    left, right = open_side("golden", golden), open_side("candidate", candidate)
    kept = left.manifests[0].kept
    other = next((s for s in left.sources if s.manifest.kept != kept), None)
    fewer = next((s for s in right.sources if s.manifest.kept not in (KeptTokens(), kept)), None)
    strange = other or fewer
    if strange is not None:
        count = len(strange.manifest.kept.columns)
        raise UserError(
            f"'{strange.run.name}' kept {count or 'all'} tokens of its prompts, and not those that "
            f"'{left.sources[0].run.name}' did",
            f"make it again with capture.tokens={len(kept.columns) or 'null'}.",
        )
    if not kept:
        return left, right
    return left, RunSet([s if s.manifest.kept else s.only(kept) for s in right.sources])


def open_side(role: str, runs: Sequence[StoredRun]) -> RunSet:
    """Open the runs of one side. Raises UserError for none, or one that is not finished."""
    if not runs:
        raise UserError(f"There is no {role} run to compare: make one, or give {role}=<run>.")
    for run in runs:
        if not run.finished:
            cure = "wait for it" if run.status in ("RUNNING", "SCHEDULED") else "run it again"
            raise UserError(
                f"Run '{run.name}' is {run.status.lower()}; only finished runs are compared: "
                f"{cure}."
            )
    # A stored run is no dump, whatever became of its manifest.
    return RunSet([RunSource(r) if r.id or r.files.is_run else open_dump(r) for r in runs])
