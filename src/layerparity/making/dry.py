"""Say what a run would read, compute and keep (``dry_run=true``), and make nothing.

Everything is decided as `make` decides it, and what it refuses before a weight is read is refused.
How long it takes, and how much it keeps, is known from an earlier run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from layerparity.anatomy.site import PREFILL
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.making import reuse, write
from layerparity.making.make import build_port, decided
from layerparity.making.prepare import Prepared
from layerparity.ports.opening import open_port
from layerparity.record.manifest import Manifest
from layerparity.settings.config import Config, RunKind
from layerparity.tracking.opening import open_to_read

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.skeleton import Skeleton
    from layerparity.ports.base import Port
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store

# How many earlier runs of a kind are looked at for one that did the like.
_LOOKED_AT = 50
COLUMNS = ("run", "fed", "reads", "keeps", "takes", "reuse")
_parts: list[list[tuple[str, ...]]] = []


def show(config: Config) -> None:
    """Say what a run would be. Raises UserError for what the run itself would refuse."""
    hushed = console.quiet() if _parts else nullcontext()
    with hushed, decided(config, open_to_read) as (store, prepared, mark):
        own = not open_port.is_ours(prepared.config.port)
        there = reuse.reusable(store, mark, own)
        # A port of processes starts them where it is built.
        ranks = open_port.ranks_device(prepared.config)
        line = _line(prepared, None if ranks else build_port(prepared), store, there)
    if _parts:
        _parts[-1].append(line)
        return
    for name, text in zip(COLUMNS, line, strict=True):
        console.say(f"{name + ':':<7}{text}")
    console.say(f"into:  {store.config.place}\ndry run: nothing was made")


@contextmanager
def gathered() -> Iterator[None]:
    """Have the runs of a block show themselves as rows of one table, at its end."""
    rows: list[tuple[str, ...]] = []
    _parts.append(rows)
    try:
        yield
    finally:
        _parts.pop()
        if rows:
            console.table("Dry run: nothing was made", COLUMNS, rows)


def _line(
    prepared: Prepared, port: Port | None, store: Store, there: StoredRun | None
) -> tuple[str, ...]:
    """Return what a run would be, by `COLUMNS`."""
    reuse_text = "no finished run is the same"
    if there is not None:
        taken = "taken" if prepared.config.reuse else "reuse=true would take it"
        reuse_text = f"{there.name} ({there.id[:8]}) is the same: {taken}"
    made, ids = _made_before(store, prepared), [each[:8] for each in prepared.inputs.runs]
    return (
        prepared.config.name or write.run_name(prepared),
        prepared.inputs.chosen + (f" ({' '.join(ids)})" if ids else ""),
        _reads(prepared, port),
        _keeps(prepared, made),
        _takes(prepared, made),
        reuse_text,
    )


def _made_before(store: Store, prepared: Prepared) -> list[tuple[StoredRun, Manifest]]:
    """Return finished runs of the model with the scope and the capture, the newest first."""
    found, digest = [], prepared.checkpoint.config_digest
    for kind in (RunKind.golden, RunKind.candidate):
        for run in store.own_runs(kind.value, _LOOKED_AT):
            if not run.finished or run.tags.get("config_digest") != digest:
                continue
            # What is damaged tells nothing; a run that wants it says so.
            with suppress(UserError):
                manifest = run.read_manifest()
                whole = set(prepared.scope.stages) <= set(manifest.stages)
                if whole and manifest.capture == prepared.wanted:
                    found.append((run, manifest))
    return sorted(found, key=lambda each: each[0].order, reverse=True)


def _keeps(prepared: Prepared, made: list[tuple[StoredRun, Manifest]]) -> str:
    alike = [m for _, m in made if m.kept == prepared.inputs.kept]
    if not alike:
        return "not known: no earlier run of this model kept these sites"
    manifest = alike[0]
    own = [each for each in manifest.records if each.site.place.stage in prepared.scope.stages]
    size = int(sum(each.bytes for each in own) * _times(prepared, manifest))
    return f"about {len(own)} sites, {console.bytes_text(size)}"


def _takes(prepared: Prepared, made: list[tuple[StoredRun, Manifest]]) -> str:
    """Return how long the stages took in the newest run of the kind on such a device."""
    config = prepared.config
    wanted = {
        "kind": config.kind.value,
        "dtype": config.dtype.value,
        "device": prepared.backend.device_label,
        "port": open_port.label(config.port),
    }
    for run, manifest in made:
        if any(run.tags.get(name) != value for name, value in wanted.items()):
            continue
        with suppress(UserError):
            profile = run.files.read_profile()
            spent = profile.stages if profile is not None else {}
            own = [each.seconds for name, each in spent.items() if name in prepared.scope.stages]
            if own:
                times = _times(prepared, manifest)
                tokens = "" if times == 1 else f", which had {1 / times:.3g} times the tokens"
                return f"about {sum(own) * times:.2g} s, by run {run.name}{tokens}"
    return "not known: no earlier run of this kind on this device"


def _times(prepared: Prepared, manifest: Manifest) -> float:
    """Return how many times the tokens of a run's prefill a new one has."""
    for each in manifest.records:
        whole = "token" in each.axes and not each.is_cut(manifest.kept)
        if whole and each.site.phase == PREFILL:
            sizes = dict(zip(each.axes, each.shape, strict=True))
            there = sizes.get("batch", 1) * sizes["token"]
            return prepared.inputs.attention_mask.numel() / max(there, 1)
    return 1.0


def _reads(prepared: Prepared, port: Port | None) -> str:
    """Return what is read of the checkpoint, as the scope's stages are stored."""
    from layerparity.making.original import OriginalPort
    from layerparity.ports.known.hf import HfPort

    checkpoint, stages = prepared.checkpoint, prepared.scope.stages
    if not isinstance(port, HfPort):
        return f"what the port reads of {checkpoint.place}"
    if isinstance(port, OriginalPort):
        parts = (port.skeleton, port.assets.checkpoint), (port.published.skeleton, checkpoint)
        return " and ".join(_read(*each, stages) for each in parts)
    return _read(port.skeleton, checkpoint, stages)


def _read(skeleton: Skeleton, checkpoint: Checkpoint, stages: Sequence[str]) -> str:
    names = {name for stage in stages for name in skeleton.sources(checkpoint, stage)}
    every = list(checkpoint.tensors.values())
    stored = [each for each in every if each.name in names]
    files, all_files = ({each.file for each in some} for some in (stored, every))
    size, whole = (console.bytes_text(sum(x.bytes for x in some)) for some in (stored, every))
    return f"{size} of {whole}, {len(files)} of {len(all_files)} files in {checkpoint.folder}"
