"""Remove old runs, or one, from the tracking store; what would go, and what stays, is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.program import program
from layerparity.settings.config import Config, RunKind
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.keeping import RunFate
    from layerparity.tracking.store import Store

# How many rows are listed of what goes, and of what stays.
_SHOWN = 40
# Parts of parts: a bisection within a sweep.
_DEEPEST = 3
# The keys of a configuration that name runs.
_NAMING = ("golden", "candidate", "run", "beside")


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("run",)


@dataclass
class Settings:
    """conf/job/gc.yaml: how old a run must be to be removed."""

    name: str = "gc"
    older_than: str | None = key(None, "runs that began longer ago go: 12h, 14d, 8w")
    apply: bool = key(False, "remove them; else they are only shown")


def run(config: Config) -> Exit:
    """Show what goes by its age, or by ``run=``, and what stays; with job.apply remove it.

    Raises UserError where neither is given, and where the named run is in use, or something refers
    to it.
    """
    from layerparity.making import steps
    from layerparity.settings.tracking import EMBEDDED
    from layerparity.tracking import removal
    from layerparity.tracking.database import FILE_NAME
    from layerparity.tracking.opening import open_store

    if config.tracking.name != EMBEDDED:
        raise UserError(
            "job=gc removes runs of a folder on this machine, and cannot see who uses a server's",
            "delete them in the server's pages, and run 'mlflow gc' where it keeps their files.",
        )
    oldest = _oldest(config)
    if not (config.tracking.root / FILE_NAME).exists():
        console.say(f"No run in {config.tracking.root}.")
        return Exit.OK
    store = open_store(config.tracking)
    found = _fates(store, config, oldest, {})
    left = removal.leftovers(store, Path.cwd())
    _show(store, found, left)
    going = [each.run for each in found if each.goes]
    if not going and not left:
        console.say("Nothing goes.")
        return Exit.OK
    if not config.job.apply:
        again = steps.command({"job": "gc", **_typed(config), "job.apply": True})
        console.say(f"Nothing was removed yet. To remove what goes: {again}")
        return Exit.OK
    for path in left:
        removal.discard(path)
    with removal.taken(store, going) as refused:
        # Whoever began to use a run before it was taken has said so by now.
        found = _fates(store, config, oldest, refused)
        asked = {each.id for each in going}
        goes = [each.run for each in found if each.goes and each.run.id in asked]
        removal.remove(store, goes, lambda each: console.say(f"removed {each.name} {each.id[:8]}"))
    for each in found:
        if each.run.id in asked and not each.goes:
            console.note(f"{each.run.name} ({each.run.id[:8]}) stays: {each.why or each.misfit}")
    console.say(f"Removed: {len(goes)} of {len(going)} runs, {len(left)} leftovers.")
    return Exit.OK


def _oldest(config: Config) -> timedelta | None:
    """Return how long ago a run began that goes; None where the command names one."""
    from layerparity.tracking.keeping import age

    older = config.job.older_than
    if config.run is not None and older is not None:
        raise UserError(
            "run= names what goes, and job.older_than= says it by age", "leave one of them out."
        )
    if config.run is None and older is None:
        raise UserError(
            "job=gc wants to know what may go",
            "add job.older_than=14d, or run=, one run. Nothing is removed before job.apply=true is "
            "added.",
        )
    return None if older is None else age(older)


def _typed(config: Config) -> dict[str, Any]:
    """Return the keys of a command that say what goes, and where it is kept."""
    from layerparity.making import steps

    asked = {"run": config.run, "job.older_than": config.job.older_than}
    given = {name: value for name, value in asked.items() if value is not None}
    own = steps.own_settings(config).items()
    return {**given, **{k: v for k, v in own if k.startswith("tracking.")}}


def _fates(
    store: Store, config: Config, oldest: timedelta | None, refused: dict[str, str]
) -> list[RunFate]:
    """Return what becomes of each run of the store, newest first. UserError for one named in vain.

    ``refused`` says why runs cannot be taken, by their ids.
    """
    from layerparity.tracking import keeping, removal

    runs, gone = store.every(), removal.deleted_runs(store)
    if oldest is None:
        named = _named(runs, config.run or "")
        if named is None:
            store.find(config.run or "")
            raise UserError(f"run={config.run} is no run of the store", "give its id.")
        found = keeping.fates(runs, gone, {named.id}, refused)
        _refuse_in_vain(next(each for each in found if each.run.id == named.id), config)
        return found
    return keeping.fates(runs, gone, oldest, {**dict(_spared(store, runs)), **refused})


def _named(runs: Sequence[StoredRun], words: str) -> StoredRun | None:
    """Return the run with this id, or unique beginning of one, or the newest with this name."""
    begins = [each for each in runs if len(words) >= 4 and each.id.startswith(words)]
    called = [each for each in runs if each.name == words]
    return begins[0] if len(begins) == 1 else called[0] if called else None


def _refuse_in_vain(fate: RunFate, config: Config) -> None:
    """Raise UserError where the very run that a command names stays."""
    if fate.goes:
        return
    cure = "wait until it has ended, or end it."
    if fate.by:
        words = ["job=gc", f"run={fate.by[:8]}", *config.tracking.words]
        cure = f"remove that one first: {program()} {' '.join(words)}"
    elif fate.misfit:
        cure = "name that one: it goes as a whole."
    run = fate.run
    raise UserError(f"'{run.name}' ({run.id[:8]}) stays: {fate.why or fate.misfit}", cure)


def _spared(store: Store, runs: Sequence[StoredRun]) -> Iterator[tuple[str, str]]:
    """Yield ids of runs that no age removes, and why: what others mean by a name."""
    from layerparity.ground.parse import parse_yaml
    from layerparity.judge.model_limits import KIND

    for kind in (RunKind.golden, RunKind.candidate):
        with suppress(UserError):
            for each in store.find("latest", kind=kind.value):
                yield each.id, f"{kind.value}=latest means it"
    for each in runs:
        if each.kind == KIND:
            yield each.id, "comparisons may use its limits"
    for path in sorted(Path.cwd().glob("experiments/**/*.yaml")):
        with suppress(ValueError, OSError):
            for words in _names_in(parse_yaml(path.read_text(encoding="utf-8"))):
                named = _named(runs, words)
                if named is not None:
                    yield named.id, f"{path.relative_to(Path.cwd())} names it"


def _names_in(value: object) -> Iterator[str]:
    """Yield the texts of a configuration, on any level, whose key may name a run."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(_listed(value)):
        if isinstance(inner, str) and str(name).rpartition(".")[2] in _NAMING:
            yield inner
        yield from _names_in(inner)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _show(store: Store, found: Sequence[RunFate], left: Sequence[Path]) -> None:
    """Print what goes, with its size, and what stays although it is as old, with why.

    Parts stand in the row of their sweep. What was not asked for is counted.
    """
    gone = [each for each in found if each.goes]
    held = [each for each in found if each.why and not each.misfit]
    total, rows, rest = 0, [], 0
    for fates in (gone, held):
        folded = _folded(fates)
        rest += len(folded[_SHOWN:])
        for number, (each, parts) in enumerate(folded):
            run, sizes = each.run, [store.size(one.run) for one in (each, *parts)]
            size = sum(one or 0 for one in sizes)
            total += size if each.goes else 0
            if number >= _SHOWN:
                continue
            began = f"{run.start_time.astimezone():%Y-%m-%d %H:%M}"
            name = f"{run.name} and its {len(parts)} parts" if parts else run.name
            room = console.bytes_text(size) if any(one is not None for one in sizes) else ""
            fate = "goes" if each.goes else f"stays: {each.why}"
            rows.append((run.id[:8], run.kind, name, began, room, fate))
    if rows:
        columns = ("id", "kind", "name", "began", "size", "what becomes of it")
        console.table(f"Runs in {store.config.place}", columns, rows)
    for path in left:
        console.say(f"leftover: {path}")
    more = f" ({rest} rows not listed)" if rest else ""
    others = len(found) - len(gone) - len(held)
    console.say(
        f"{len(gone)} go, {console.bytes_text(total)}; {len(held)} stay although asked for; "
        f"{others} not asked for{more}"
    )


def _folded(fates: Sequence[RunFate]) -> list[tuple[RunFate, list[RunFate]]]:
    """Return each run with the parts of it that share its fate, which have no row of their own."""
    rows: dict[str, tuple[RunFate, list[RunFate]]] = {each.run.id: (each, []) for each in fates}
    above = {each.run.id: each.run.parent or "" for each in fates}
    for each in fates:
        top = each.run.id
        # A damaged store may have a run that is part of itself.
        for _ in range(_DEEPEST):
            top = above[top] if above[top] in above else top
        if top != each.run.id:
            rows[top][1].append(each)
    under = {part.run.id for _, parts in rows.values() for part in parts}
    return [row for name, row in rows.items() if name not in under]
