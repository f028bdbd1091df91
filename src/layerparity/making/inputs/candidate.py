"""inputs=candidate: a golden is fed what a candidate recorded, stage by stage and at every site.

Each value of the golden is then computed from the candidate's own values directly before it, so
that a comparison judges one operation at a time. Where a candidate recorded no sites inside a
block, the golden goes on by itself from what the block was fed.

With feed=chained it is fed the candidate's tokens alone: what a candidate that shows nothing of its
blocks ends with is held against a whole chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerparity.anatomy.family import ATTENDED, ROUTED
from layerparity.anatomy.site import EMBEDDING, HEAD, NORM, Kind, Site
from layerparity.ground.errors import UserError
from layerparity.ground.quoting import typed
from layerparity.making.inputs.golden import RecordedInputs, RecordedTensors, inputs_of
from layerparity.making.request.goldens import (
    RecordedRun,
    names_of,
    newest_first,
    recorded_input,
    refuse_other_model,
)
from layerparity.making.request.inputs import Inputs, Request
from layerparity.ports.opening import open_backend, open_port
from layerparity.record.manifest import Manifest, Record, SitePatterns
from layerparity.settings.config import Config, FeedMode, RunKind
from layerparity.settings.key import key

TOKENS = Site(EMBEDDING, "in")


@dataclass
class Settings:
    """conf/inputs/candidate.yaml: the candidate whose values are fed; null: the newest."""

    name: str = "candidate"
    run: str | None = key(
        None, "the candidate whose recorded values are fed: id, name or folder; null: the newest"
    )


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return what a candidate recorded of the scope, to feed a golden with.

    Raises UserError for a run that is no golden by port=hf, and for a candidate that is a dump, of
    another model or dtype, or that recorded no input of a stage.
    """
    _refuse_others(request.config)
    runs = newest_first(request.candidate(settings.run))
    if not runs:
        raise UserError(
            "There is no candidate run whose values could be fed: make one first, with "
            "kind=candidate capture=components."
        )
    dumps = [run for run in runs if not (run.id or run.files.is_run)]
    if dumps:
        raise UserError(
            f"{dumps[0].name} is a folder of dumps, and inputs=candidate is fed by a run: keep "
            f"it as one by job=capture {typed('job.folder', str(dumps[0].folder))}."
        )
    sources = [RecordedRun.of(run) for run in runs]
    _refuse_unlike(sources, request)
    if request.config.feed is FeedMode.chained:
        return _tokens_of(sources, request, names_of(runs))
    manifests = [source.manifest for source in sources]
    if request.stages[0] == "layers.0" and any(each.record(TOKENS) for each in manifests):
        # A candidate whose blocks begin with the first was given tokens, and embedded them.
        request = replace(request, stages=(EMBEDDING, *request.stages))
    lacking = _lacking(manifests, request)
    if lacking:
        raise UserError(
            f"Candidate {names_of(runs)} did not store {request.site_of(lacking)}, which "
            f"{lacking} is fed: make it with capture=components, or choose a scope that it ran."
        )
    recorded = RecordedInputs(sources, request, FeedMode.isolated)
    own = RecordedTensors(_inside_blocks(sources, request))
    used = [source for source, _ in (*recorded.records.values(), *own.records.values())]
    contents = tuple(sorted({source.manifest.content for source in used}))
    return replace(
        inputs_of(recorded, request, FeedMode.isolated),
        source="candidate",
        chosen=f"the own values of candidate {names_of(runs)}",
        own=own,
        values_of=contents,
        origin=" ".join(contents),
        capture=_with_more(manifests[0].capture),
    )


def _tokens_of(sources: Sequence[RecordedRun], request: Request, names: str) -> Inputs:
    """Return what a candidate was fed at the start of its chain. Raises UserError for none."""
    recorded = RecordedInputs(sources, request, FeedMode.chained)
    if request.stages[0] != EMBEDDING or not recorded.records:
        raise UserError(
            f"inputs=candidate feed=chained begins with the tokens of {names}",
            "use scope=full, and a candidate that recorded embed_tokens:in.",
        )
    own = inputs_of(recorded, request, FeedMode.chained)
    # All that begin with these tokens have one golden, unless further ones are told to it.
    origin = own.origin if request.config.generate.max_new_tokens else ""
    chosen = f"the tokens of candidate {names}"
    return replace(own, source="candidate", chosen=chosen, origin=origin)


def _with_more(capture: SitePatterns) -> SitePatterns:
    """Return a candidate's sites, and what tells of them beside it.

    What was chosen says which experts and tokens were used, and where a tie may have had others
    chosen; what an MLP gives out says whether a block's output lacks the stream.
    """
    more = [each for each in (ROUTED, ATTENDED, "mlp:out") if not capture(layer=None, local=each)]
    return replace(capture, include=(*capture.include, *more)) if capture.include else capture


def _lacking(manifests: Sequence[Manifest], request: Request) -> str:
    """Return the first stage whose input no run recorded and nothing else gives; '' for none.

    The embedding copies rows, so that block 0 may go on from it. What stands behind the blocks
    and was fed nothing recorded goes on from the golden's own, and is not judged.
    """
    for before, stage in zip(("", *request.stages), request.stages, strict=False):
        copied = before == EMBEDDING and stage == "layers.0"
        unjudged = before != "" and stage in (NORM, HEAD)
        if not (copied or unjudged or any(recorded_input(m, request, stage) for m in manifests)):
            return stage
    return ""


def _refuse_others(config: Config) -> None:
    """Raise UserError unless the run is an isolated golden, computed as port=hf computes it."""
    if config.kind is not RunKind.golden:
        raise UserError("inputs=candidate makes a golden: use backend=gpu, or add kind=golden.")
    port = open_port.label(config.port)
    if port != "hf":
        raise UserError(f"inputs=candidate feeds the sites of port=hf alone, not of {port}.")
    if not open_backend.abilities(config).references:
        raise UserError(
            f"inputs=candidate makes a golden with references, and backend={config.backend.name} "
            "makes none: use backend=gpu, on the CPU with device_map=cpu."
        )
    if getattr(config.backend, "compile", False):
        raise UserError(
            "inputs=candidate replaces values inside blocks, and compiled ones have no inside: "
            "use backend.compile=false."
        )


def _refuse_unlike(sources: Sequence[RecordedRun], request: Request) -> None:
    """Raise UserError where a candidate is of another model, or was computed in another type."""
    asked = request.config.dtype.value
    for source in sources:
        manifest, name = source.manifest, source.run.name
        refuse_other_model(f"Candidate {name}", manifest, request)
        if manifest.kept:
            raise UserError(
                f"Candidate {name} stored {len(manifest.kept.columns)} tokens of its sites, and a "
                "golden goes on from all",
                "make it with capture.tokens=null, or compare it as it is.",
            )
        if manifest.dtype != asked:
            raise UserError(
                f"Candidate {name} computed in {manifest.dtype}, and a golden of its own values "
                f"would round them to {asked}: add dtype={manifest.dtype}."
            )


def _inside_blocks(
    sources: Sequence[RecordedRun], request: Request
) -> dict[Site, tuple[RecordedRun, Record]]:
    """Return what was recorded between the ends of the scope's blocks, each from the newest run.

    Steps beyond those that are generated are left out.
    """
    layers = {Site(stage, "in").layer for stage in request.stages} - {None}
    steps = max(request.config.generate.max_new_tokens, 1)
    found: dict[Site, tuple[RecordedRun, Record]] = {}
    for source in sources:
        for record in source.manifest.records:
            site = record.site
            inside = site.layer in layers and site.local not in (":in", ":out")
            if inside and record.kind is Kind.REAL and site.step < steps:
                found.setdefault(site, (source, record))
    return found
