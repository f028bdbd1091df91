"""inputs=golden: what other runs recorded at the inputs of the scope's stages (isolated mode)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import DECODE, PREFILL, Site, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.files import damaged, text_digest
from layerparity.ground.program import program
from layerparity.ground.quoting import typed
from layerparity.making.request import repeated
from layerparity.making.request.goldens import (
    RecordedRun,
    lacks,
    names_of,
    newest_first,
    recorded_at,
    recorded_input,
    refuse_other_model,
)
from layerparity.making.request.inputs import Inputs, Request
from layerparity.model.weight_types import own_type
from layerparity.ports.replay_keys import replays
from layerparity.record.folder import MANIFEST, RunFolder
from layerparity.record.manifest import Manifest, Record
from layerparity.settings.config import FeedMode
from layerparity.settings.key import key

if TYPE_CHECKING:
    import torch

_ALWAYS = ("attention_mask", "position_ids")
# Where a golden can be made on any machine.
GOLDEN_HERE = {"backend": "gpu", "device_map": "cpu"}


@dataclass
class Settings:
    """conf/inputs/golden.yaml: the run to take inputs from; null: the newest that fits."""

    name: str = "golden"
    run: str | None = key(None, "the golden whose recorded inputs are fed: id, name or folder")


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return the recorded inputs of the scope. Raises UserError where no run recorded one."""
    runs = request.golden(settings.run or request.config.golden)
    if not runs:
        raise UserError(
            "There is no golden run of this model that holds the inputs of "
            f"{request.stages[0]}. Make one first: {golden_command(request)}"
        )
    return from_runs(runs, request)


def from_runs(runs: Sequence[Any], request: Request) -> Inputs:
    """Return the inputs that runs recorded, each site from the newest run that holds it.

    Tensors are read when they are asked for. Raises UserError where runs are of another model, were
    fed different tokens, or lack a site or a choice that is to be repeated.
    """
    runs = newest_first(runs)
    sources = [RecordedRun.of(run) for run in runs]
    for source in sources:
        refuse_other_model(f"Golden run {source.run.name}", source.manifest, request)
    manifests = [source.manifest for source in sources]
    lacking = lacks(manifests, request)
    if lacking:
        raise UserError(
            f"Golden run {names_of(runs)} did not store {request.site_of(lacking)}, which "
            f"{lacking} is fed. Make one that does: {golden_command(request)}"
        )
    feed = _feed_of(sources, request)
    unrouted = repeated.lacking(manifests, request)
    if unrouted is not None:
        asked = str(replays(request.config)).lower()
        what = f"{unrouted}, which port.replay={asked} repeats"
        repeated.refuse_unshown(unrouted, request, what)
        tokens = request.config.generate.max_new_tokens
        more = f" generate.max_new_tokens={tokens}" if tokens else ""
        raise UserError(
            f"Golden run {names_of(runs)} did not store {what}. Make one that does: "
            f"{golden_command(request)}{more}"
        )
    recorded = RecordedInputs(sources, request, feed)
    _refuse_mixed(recorded.holders)
    _, fed = recorded.records[recorded.sites[request.stages[0]]]
    # A golden may come from a machine with more memory.
    request.refuse_large(*fed.shape[:2], "make a golden with")
    return inputs_of(recorded, request, feed)


class RecordedTensors(Mapping[Site, "torch.Tensor"]):
    """Recorded tensors by site, read from disk, and proved, each time one is asked for.

    ``records`` say which run holds a site, and where.
    """

    def __init__(self, records: Mapping[Site, tuple[RecordedRun, Record]]) -> None:
        self.records = dict(records)
        for source, record in self.records.values():
            # Refused here, before anything runs.
            source.run.files.refuse_outside(record.file)

    def __contains__(self, site: object) -> bool:
        # Nothing is read to say it.
        return site in self.records

    def __getitem__(self, site: Site) -> torch.Tensor:
        source, record = self.records[site]
        tensor: torch.Tensor = source.run.files.read_tensor(record)
        return tensor

    def __iter__(self) -> Iterator[Site]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


class RecordedInputs(RecordedTensors):
    """What runs recorded of the inputs of a scope's stages.

    Values are floating [batch, token, channel], int64 [batch, token] of tokens, and [batch, token,
    k] of choices. ``sites`` are those of the stages' inputs, by stage. ``used`` are the runs that
    they come from, ``holders`` all that hold a site.
    """

    def __init__(self, sources: Sequence[RecordedRun], request: Request, feed: FeedMode) -> None:
        found: dict[Site, tuple[RecordedRun, Record]] = {}
        self.sites: dict[str, Site] = {}
        self.holders: list[RecordedRun] = []
        chained = feed is FeedMode.chained
        stages = request.stages[:1] if chained else request.stages
        for source in sources:
            records = []
            for stage in stages:
                record = recorded_input(source.manifest, request, stage)
                if record is not None:
                    records.append(record)
                    # The newest comes first.
                    self.sites.setdefault(stage, record.site)
            records += [] if chained else _steps(source.manifest, request)
            records += repeated.choices(source.manifest, request)
            for record in records:
                found.setdefault(record.site, (source, record))
            if records:
                self.holders.append(source)
        super().__init__(found)
        chosen = [source for source, _ in found.values()]
        self.used = [source for source in self.holders if source in chosen]


def golden_command(request: Request) -> str:
    """Return the command that makes the golden run this scope needs."""
    config = request.config
    asked, words = config.model, ["scope=full"]
    if asked.path:
        words.append(typed("model.path", asked.path))
    else:
        words.append(typed("model", asked.name))
    for part in ("revision", "subfolder", "adapter"):
        if value := getattr(asked, part):
            words.append(typed(f"model.{part}", value))
    # A golden has the noise floor of its own dtype.
    if config.dtype.value != own_type(request.model):
        words.append(typed("dtype", config.dtype.value))
    words += ["capture=components"] if config.component else []
    here = [f"{key}={value}" for key, value in GOLDEN_HERE.items()]
    return " ".join([program(), *here, *words, *config.tracking.words])


def inputs_of(recorded: RecordedInputs, request: Request, feed: FeedMode) -> Inputs:
    """Return recorded values as one batch, its mask, positions and tokens those of their run."""
    used, names = recorded.used, names_of([source.run for source in recorded.used])
    folder, listed = RunFolder(used[0].folder), used[0].manifest.inputs
    for name in _ALWAYS:
        if name not in listed:
            raise damaged(used[0].folder / MANIFEST, f"it lists no {name}")
    kept = folder.read_inputs(listed)
    length = kept["attention_mask"].shape[1]
    if request.config.seq_len not in (None, length):
        raise UserError(
            f"Golden run {names} has {length} tokens, not seq_len={request.config.seq_len}: leave "
            "seq_len out, or make a golden run with it."
        )
    marks = [source.manifest.fingerprint for source in used]
    return Inputs(
        source="golden",
        attention_mask=kept["attention_mask"],
        position_ids=kept["position_ids"],
        token_ids=kept.get("token_ids"),
        given=recorded,
        texts=folder.read_prompts(),
        synthetic=any(source.manifest.synthetic for source in used),
        origin=marks[0] if len(marks) == 1 else text_digest("\n".join(sorted(marks))),
        chosen=f"the inputs recorded by golden run {names}",
        runs=tuple(source.key for source in used),
        feed=feed,
        sites=recorded.sites,
        recorded=_by_block(used),
        kept=used[0].manifest.kept,
    )


def _by_block(sources: Sequence[RecordedRun]) -> dict[str, dict[str, SiteSpec]]:
    """Return which sites runs recorded of a prefill, by block and by site inside it."""
    found: dict[str, dict[str, SiteSpec]] = {}
    for record in (each for source in sources for each in source.manifest.records):
        if record.site.layer is not None and record.site.phase == PREFILL:
            sites = found.setdefault(f"layers.{record.site.layer}", {})
            # As values are: of the newest run that holds them.
            sites.setdefault(record.site.local, SiteSpec(record.axes, record.kind))
    return found


def _refuse_mixed(sources: Sequence[RecordedRun]) -> None:
    """Raise UserError unless all runs that hold the scope's inputs were fed one batch."""
    first = sources[0]
    for other in sources[1:]:
        one, two = first.manifest.inputs, other.manifest.inputs
        unequal = sorted(name for name in set(one) & set(two) if one[name] != two[name])
        unequal += ["capture.tokens"] * (first.manifest.kept != other.manifest.kept)
        if unequal:
            raise UserError(
                f"Golden runs {first.run.name} and {other.run.name} were fed different inputs "
                f"({', '.join(unequal)}): choose one with golden={first.key[:8]}."
            )


def _feed_of(sources: Sequence[RecordedRun], request: Request) -> FeedMode:
    """Return how blocks are fed: isolated, unless the command says otherwise.

    Where no run recorded the decode steps, blocks are chained. Raises UserError where the command
    says isolated.
    """
    asked, wanted = request.config.feed, request.config.generate.max_new_tokens
    if asked is FeedMode.chained:
        return FeedMode.chained
    steps = {record.site.step for each in sources for record in _steps(each.manifest, request)}
    if wanted <= 1 or steps >= set(range(1, wanted)):
        return FeedMode.isolated
    if asked is FeedMode.isolated:
        raise UserError(
            f"Golden run {names_of([each.run for each in sources])} generated "
            f"{max(steps, default=-1) + 1} tokens, not {wanted}: make one with "
            f"generate.max_new_tokens={wanted}, or use feed=chained."
        )
    return FeedMode.chained


def _steps(manifest: Manifest, request: Request) -> list[Record]:
    """Return what a run recorded of the scope's inputs, and of its tokens, while it decoded."""
    wanted = request.config.generate.max_new_tokens
    if not wanted:
        return []
    fed = {site for stage in request.stages for site in recorded_at(manifest, request, stage)}
    fed.add(Site("tokens", "out"))
    return [
        record
        for record in manifest.records
        if record.site.phase == DECODE
        and record.site.step < wanted
        and Site(record.site.path, record.site.end) in fed
    ]
