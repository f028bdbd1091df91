"""Find the stored golden runs that feed a scope: those named, or the newest that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.blocks import by_layer
from layerparity.anatomy.site import Place, Site, overlap
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.making.request.scope import begins_with_tokens
from layerparity.model.config_digest import config_digest
from layerparity.record.manifest import Manifest, Record
from layerparity.settings.config import LATEST, Config, FeedMode, RunKind

if TYPE_CHECKING:
    from layerparity.making.request.inputs import Request
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store


LOOKED_AT = 50
MENTIONED = 3


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A stored run whose values may be fed, and its manifest; files are fetched when read."""

    run: Any
    manifest: Manifest

    @classmethod
    def of(cls, run: Any) -> RecordedRun:
        """Open a run by its manifest. Raises UserError where it has none that can be read."""
        return cls(run, run.read_manifest())

    @property
    def folder(self) -> Path:
        """The run's artifacts."""
        return Path(self.run.folder)

    @property
    def key(self) -> str:
        """What names the run for ever: its id, or its folder where it is in no store."""
        return str(self.run.id or self.folder)


def refuse_unknown(config: Config, stages: Sequence[str], store: Store) -> None:
    """Raise UserError where stages are to be fed by a golden run that is not in the store."""
    name = asked_for(config, stages)
    if name is not None and name != LATEST:
        # What is found is said where it is used.
        with console.quiet():
            store.find(name, kind=RunKind.golden.value)


def asked_for(config: Config, stages: Sequence[str]) -> str | None:
    """Return the golden run that is named and will be looked up for some stages, or None."""
    if config.inputs.name == "golden":
        return config.inputs.run or config.golden
    looks = config.inputs.name == "auto" and is_looked_for(config, stages)
    return config.golden if looks else None


def is_looked_for(config: Config, stages: Sequence[str]) -> bool:
    """Say whether inputs=auto looks for a golden run to feed some stages.

    A prompt that was asked for wins, and a golden run never takes a golden's inputs where it can
    begin with tokens itself.
    """
    by_golden = config.kind is RunKind.candidate or not begins_with_tokens(stages)
    return by_golden and not config.prompt.given


def golden_for(
    store: Store, reference: str | None, checkpoint: Checkpoint, request: Request
) -> Sequence[StoredRun]:
    """Return the golden runs asked for, or the newest that hold the scope's inputs, or none.

    A sweep is the union of its finished children. Goldens by transformers are preferred to newer
    ones by another port, those in the run's own dtype to newer ones in another. A golden made from
    other weights is passed over, or, where it was asked for by name, mentioned. Raises UserError
    where the reference names nothing.
    """
    same = SameWeights(checkpoint, request.stages)
    if reference is not None and reference != LATEST:
        asked = store.find(reference, kind=RunKind.golden.value)
        of = {RecordedRun.of(run).manifest.model.config_digest for run in asked}
        # Of another model all weights are others: whoever uses it says which model it is.
        other = same.differing(_used(asked)) if of == {checkpoint.config_digest} else ""
        if other:
            console.note(f"golden run {names_of(asked)} was made from other weights: {other}")
        return asked
    best: Sequence[StoredRun] = ()
    least, mentioned = (True, True), 0
    for runs in _sets(store):
        why = _obstacle(runs, checkpoint, request, same)
        if why:
            mentioned += 1
            if mentioned <= MENTIONED:
                console.note(f"golden run {names_of(runs)} is passed over: {why}")
        elif why is not None:
            alike = all(run.tags.get("dtype") == request.config.dtype.value for run in runs)
            short = not all(run.by_transformers for run in runs), not alike
            if not best or short < least:
                best, least = runs, short
            if not any(short):
                break
    return best


def lacks(manifests: Sequence[Manifest], request: Request) -> str:
    """Return the first stage of the scope whose input no run recorded, or an empty string."""
    # Of a chain only the first stage is fed from outside.
    fed = request.stages[:1] if request.config.feed is FeedMode.chained else request.stages
    for stage in fed:
        if not any(recorded_input(manifest, request, stage) for manifest in manifests):
            return stage
    return ""


def recorded_input(manifest: Manifest, request: Request, stage: str) -> Record | None:
    """Return what a run recorded of a stage's input, wherever it did."""
    found = filter(None, map(manifest.record, recorded_at(manifest, request, stage)))
    return next((each for each in found if not each.is_cut(manifest.kept)), None)


def recorded_at(manifest: Manifest, request: Request, stage: str) -> Sequence[Site]:
    """Return the sites where a run may have recorded what a stage is fed.

    What the run measured of the stage's block counts, whatever the family declares.
    """
    layer = Place.parse(stage).layer
    measured = by_layer(manifest.blocks)
    return request.sites_of(stage, measured.get(layer) if layer is not None else None)


def refuse_other_model(run: str, manifest: Manifest, request: Request) -> None:
    """Raise UserError where a run, as a sentence calls it, is not of the model that is asked for.

    Both are named, and told apart by what they differ in: their architecture or their sizes.
    """
    if manifest.model.config_digest == config_digest(request.model):
        return
    theirs, ours = manifest.model.model_type, str(request.model.get("model_type"))
    other = f"{theirs} against {ours}" if theirs != ours else f"both {ours}, with other sizes"
    raise UserError(
        f"{run} is of another model: {manifest.model.name}, and this run is of "
        f"{request.config.model.label} ({other})",
        "name a run of the same model, or give model= of that one.",
    )


def newest_first(runs: Sequence[Any]) -> list[Any]:
    """Return runs as their store counted them, the newest first."""
    return sorted(runs, key=lambda run: run.order, reverse=True)


def _sets(store: Store) -> Iterator[Sequence[StoredRun]]:
    """Yield the finished golden runs, newest first, each sweep as one set."""
    kind = RunKind.golden.value
    sweeps: set[str] = set()
    for run in store.own_runs(kind, LOOKED_AT):
        if not run.finished or run.parent in sweeps:
            continue
        if run.parent is None:
            yield [run]
            continue
        sweeps.add(run.parent)
        yield store.find(run.parent, kind=kind)


def _obstacle(
    runs: Sequence[StoredRun], checkpoint: Checkpoint, request: Request, same: SameWeights
) -> str | None:
    """Return why runs cannot feed the scope: empty if they can, None if nobody would ask."""
    try:
        off = next((run.off for run in runs if run.off), "")
        manifests = [RecordedRun.of(run).manifest for run in runs]
        if any(manifest.values_of for manifest in manifests):
            # What it computed from a candidate's values, no other run should start from.
            return None
        strange = [m for m in manifests if m.model.config_digest != checkpoint.config_digest]
        if strange or lacks(manifests, request):
            return None
        other = "" if off else same.differing(_used(runs))
    except UserError as error:
        return str(error)
    return off or (f"it was made from other weights: {other}" if other else "")


def _used(runs: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return the digests of the tensors that runs used, by stage and stored name, as listed."""
    digests: dict[str, dict[str, str]] = {}
    # The newest listing of a stage counts, as it does for its tensors.
    for run in reversed(newest_first(runs)):
        digests |= run.files.read_used_weights()
    return digests


def names_of(runs: Sequence[Any]) -> str:
    """Return stored runs as a message names them: the first, and how many more its sweep has."""
    more = f" and {len(runs) - 1} more of its sweep" if len(runs) > 1 else ""
    return f"{runs[0].name}{more}"


# Models up to this size are compared whole; of larger ones this much, spread over the stages.
BUDGET = 2**30


class SameWeights:
    """Compares the tensors of a scope's stages with digests, reading each tensor once.

    What is read is chosen by the hash of its name: small tensors and large ones, in every stage. A
    change in a tensor that was not chosen is left to the comparison, which knows every digest.
    """

    def __init__(self, checkpoint: Checkpoint, stages: Sequence[str], budget: int = BUDGET) -> None:
        self.checkpoint, self.stages, self.budget = checkpoint, stages, budget
        self._digests: dict[str, str] = {}

    def differing(self, used: Mapping[str, Mapping[str, str]]) -> str:
        """Return the first tensor that differs from ``used`` (digests by name, by stage), or ''.

        Only stages that overlap the scope are looked at: all of them where none does.
        """
        shared = {
            stage: listed
            for stage, listed in used.items()
            if any(overlap(mine, stage) for mine in self.stages)
        }
        shared = shared or dict(used)
        absent = self.checkpoint.absent
        for digests in shared.values():
            listed = {name: digest for name, digest in digests.items() if name not in absent}
            lost = [name for name in listed if name not in self.checkpoint.tensors]
            if lost:
                return f"the checkpoint holds no {lost[0]}"
            names = self._sample(listed, self.budget // len(shared))
            for name, digest in self._read(names).items():
                if digest != listed[name]:
                    return name
        return ""

    def _sample(self, names: Mapping[str, str], room: int) -> list[str]:
        sizes = {name: self.checkpoint.tensors[name].bytes for name in names}
        chosen = []
        for name in sorted(sizes, key=text_digest):
            if sizes[name] <= room:
                room -= sizes[name]
                chosen.append(name)
        return chosen or sorted(sizes, key=lambda name: sizes[name])[:1]

    def _read(self, names: Sequence[str]) -> dict[str, str]:
        fresh = [name for name in names if name not in self._digests]
        try:
            self._digests |= self.checkpoint.read(fresh)[1]
        except OSError as error:
            where = self.checkpoint.place
            raise UserError(f"{where} cannot be read ({error}): check the disk.") from error
        return {name: self._digests[name] for name in names}
