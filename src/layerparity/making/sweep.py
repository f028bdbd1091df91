"""Open the parent run of a Hydra multirun before its jobs, and close it whatever happens.

Imported whenever Hydra starts, so mlflow is only imported once a sweep really begins.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.ground.secrets import redacted
from layerparity.making import endings, part_devices
from layerparity.making.names import scope_in_name
from layerparity.settings.key import check_numbers
from layerparity.settings.tracking import EMBEDDED, read_config
from layerparity.tracking.process import stop_behind

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.active import ActiveRun
    from layerparity.tracking.store import Store

PARENT_VARIABLE = "LAYERPARITY_PARENT_RUN"
# How many parts a sweep has, and when it began, in seconds of the clock.
PARTS_VARIABLE = "LAYERPARITY_SWEEP_PARTS"
SWEPT_JOB = "run"
REFUSED = "REFUSED"
SILENT = "LEFT NO WORD"
# The launcher that runs parts in this process.
_OWN_LAUNCHER = "BasicLauncher"
# The kind of a sweep is its own; that of its children tells what it can stand for.
_SHARED_TAGS = {name: name for name in ("backend", "device", "model", "dtype", "port", "feed")}
_SHARED_TAGS |= {"holds": "kind", "golden": "inputs_from"}
# What a sweep is called until its parts say what they are.
_UNNAMED = "sweep {}"
# Letters of a name.
_LONGEST = 200
_open: list[tuple[Store, ActiveRun, list[str]]] = []


class ChildRow(NamedTuple):
    """One line of a sweep's closing table."""

    name: str
    status: str
    url: str


class CannotBegin(BaseException):
    """A sweep that cannot begin, and why. Hydra makes a mere warning of a callback's Exception."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class ClosedSweep(NamedTuple):
    """A sweep that ended: a row for each part, its runs, its id, and its command's words.

    ``total`` is how many parts there are; one that was stopped did not begin all of them.
    ``runless`` are the words of each part that ended before it had a run.
    """

    rows: list[ChildRow]
    children: list[StoredRun]
    parent: str
    words: list[str]
    total: int
    runless: tuple[str, ...] = ()


class SweepParent(Callback):
    """Hydra callback: opens the parent run of a multirun of ``job=run`` and tells its children."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Open the parent and put its id into the environment, where workers see it too.

        Raises CannotBegin where a part has a value that is none, and where the store cannot be
        used.
        """
        # An id left by an outer command is not this sweep's parent.
        os.environ.pop(PARENT_VARIABLE, None)
        try:
            overrides = [
                str(each) for each in OmegaConf.select(config, "hydra.overrides.task") or ()
            ]
            params = OmegaConf.select(config, "hydra.sweeper.params") or {}
            parts = parts_of([*(f"{key}={value}" for key, value in params.items()), *overrides])
            refuse_none(parts)
            makes_runs = config.hydra.runtime.choices.get("job") == SWEPT_JOB
            if makes_runs:
                _refuse_several_stores(parts)
            _refuse_misfits(parts, overrides)
            folder = OmegaConf.select(config, "hydra.sweep.dir")
            _make_folder(folder)
            launcher = OmegaConf.select(config, "hydra.launcher._target_") or _OWN_LAUNCHER
            if not launcher.endswith(_OWN_LAUNCHER):
                endings.await_parts(Path(folder), [" ".join(words) for words in parts])
                part_devices.keep_shown()
            if not makes_runs:
                return
            from layerparity.tracking.opening import open_store

            store = open_store(config.tracking)
            name = config.get("name") or _UNNAMED.format(" ".join(overrides))
            parent = store.begin(redacted(name)[:_LONGEST], "sweep", {}, {"overrides": overrides})
            os.environ[PARENT_VARIABLE] = parent.id
            os.environ[PARTS_VARIABLE] = f"{len(parts)} {time.time()}"
            console.say(f"{parent.name}  {parent.id}\n{parent.url}")
            _open.append((store, parent, overrides))
        except Exception as error:
            raise CannotBegin(error) from error


def parts_of(words: list[str]) -> list[list[str]]:
    """Return the words of each part of a sweep, as Hydra's own sweeper combines them.

    A pattern of options wants Hydra initialised.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    known = GlobalHydra.instance()
    # Hydra expands a pattern of options by what it found.
    parser = OverridesParser.create(known.config_loader() if known.is_initialized() else None)
    (parts,) = BasicSweeper.split_arguments(parser.parse_overrides(words), None)
    return parts


def refuse_none(parts: list[list[str]]) -> None:
    """Raise UserError for a sweep of nothing."""
    if not parts:
        raise UserError(
            "This sweep has no parts: a list or range in it is empty",
            "give it a value, such as layer=range(0,4), which is 0 to 3.",
        )


def _refuse_several_stores(parts: list[list[str]]) -> None:
    """Raise UserError where a sweep's parts would be kept in other places than the sweep is."""
    first, *others = ({w for w in words if w.startswith("tracking")} for words in parts)
    if any(each != first for each in others):
        raise UserError(
            "A sweep and its parts are kept in one store, and these have several",
            "give tracking one value, and type the command once for each store.",
        )


def _refuse_misfits(parts: list[list[str]], composed: list[str]) -> None:
    """Raise for a part's value that its key does not take, as Hydra will, but before it begins.

    The words that are ``composed`` have been read.
    """
    from hydra import compose
    from hydra.core.override_parser.overrides_parser import OverridesParser

    own = dict.fromkeys(word for words in parts for word in words if word not in composed)
    if not own:
        return
    parser, loader = OverridesParser.create(), GlobalHydra.instance().config_loader()
    parsed = {word: parser.parse_override(word) for word in own}
    swept = {each.key_or_group for each in parsed.values()}
    groups = {name for name in swept if loader.get_group_options(name)}
    values = {
        w: each for w, each in parsed.items() if _sets(each) and each.key_or_group not in groups
    }
    # Which keys there are goes by the options. Composing takes 0.1 s: a value is tried by itself.
    tried: dict[tuple[str, ...], dict[str, Any]] = {}
    for words in parts:
        choices = tuple(word for word in words if word not in values)
        tried.setdefault(choices, {}).update({w: values[w] for w in words if w in values})
    for choices, overrides in tried.items():
        keys = compose("config", overrides=list(choices))
        _check_numbers(keys)
        for each in overrides.values():
            OmegaConf.update(keys, each.key_or_group, each.value())
            _check_numbers(keys)


def _check_numbers(keys: Any) -> None:
    """Hold the numbers of composed keys against their bounds, where they have a schema."""
    settings = OmegaConf.to_object(keys)
    if is_dataclass(settings):
        check_numbers(settings)


def _sets(override: Any) -> bool:
    """Say whether an override gives a key that is there another value."""
    return not (override.is_add() or override.is_force_add() or override.is_delete())


def open_store(tracking: object) -> Store:
    """Open a store; for a part of this process's sweep, the one that its parent is open in.

    An embedded store is looked at when it is opened: whether it is whole, and who left runs open.
    A server is asked again for every part: what waits to be uploaded waits no longer than it must.
    """
    from layerparity.tracking import opening

    for mine, _, _ in _open:
        if mine.config.name == EMBEDDED and mine.config == read_config(tracking):
            return mine
    return opening.open_store(tracking)


def part() -> str:
    """Return the words that make the job at hand one part of a sweep; empty outside of sweeps."""
    if PARENT_VARIABLE not in os.environ or not HydraConfig.initialized():
        return ""
    return " ".join(HydraConfig.get().overrides.task)


def close_parent(
    failed: bool = False,
    error: BaseException | None = None,
    refused: Mapping[str, str] | None = None,
    silent: Sequence[str] = (),
) -> ClosedSweep:
    """Close the parent run, if this process opened one; return what it held.

    FINISHED if every part finished; KILLED if the sweep or a child was stopped; else FAILED, also
    when ``failed`` says that a job ended before it had a run. ``error``, or the exception that is
    being handled (this is called in a ``finally``), is what ended the sweep. ``refused`` says why,
    by `part`, a job did not succeed; those that had no run get a row too. ``silent`` are the parts
    whose process, perhaps on another node, ended without a word.
    """
    os.environ.pop(PARENT_VARIABLE, None)
    parts, _, _ = os.environ.pop(PARTS_VARIABLE, "").partition(" ")
    if not _open:
        return ClosedSweep([], [], "", [], 0)
    store, parent, shared = _open.pop()
    children = store.children(parent.id)
    known = {child.tags.get("part") for child in children}
    lost = {words: why for words, why in (refused or {}).items() if words not in known}
    unheard = [words for words in silent if words not in known]
    error = error or sys.exception()
    told = _summary(children, {REFUSED: len(lost), SILENT: len(unheard)})
    description = _description(told, shared)
    parent.set_tags({**told, "description": description, "mlflow.note.content": description})
    if children:
        parent.share_input(children[0].id)
    unnamed = redacted(_UNNAMED.format(" ".join(shared)))[:_LONGEST]
    if parent.name == unnamed and (name := _name_of(children)):
        parent.rename(name)
    endings = {child.status for child in children}
    stopped = stop_behind(error) is not None or "KILLED" in endings
    whole = endings == {"FINISHED"} and not (failed or lost or silent) and error is None
    parent.end("KILLED" if stopped else "FINISHED" if whole else "FAILED", error)
    rows = [ChildRow(child.name, _status(child, silent), child.url) for child in children]
    rows += [ChildRow(_own_words(words, shared), REFUSED, why) for words, why in lost.items()]
    rows += [
        ChildRow(_own_words(words, shared), SILENT, "nothing heard of it") for words in unheard
    ]
    total = max(len(rows), int(parts or 0)) if stopped else len(rows)
    return ClosedSweep(rows, children, parent.id, shared, total, tuple(lost))


def _make_folder(folder: str | None) -> None:
    """Make the folder that Hydra makes next, where a failure would be nobody's fault."""
    try:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write to {folder} ({error.strerror}): choose another folder with "
            "tracking.folder=FOLDER."
        ) from error


def _own_words(words: str, shared: list[str]) -> str:
    """Return what tells a part from the others: its words without those that all of them have."""
    return " ".join(word for word in words.split(" ") if word not in shared) or words


def _status(child: StoredRun, silent: Sequence[str]) -> str:
    """Return how a part ended, as its run says; unless nobody will close it any more."""
    return (
        SILENT if child.status == "RUNNING" and child.tags.get("part") in silent else child.status
    )


def _name_of(children: Sequence[StoredRun]) -> str:
    """Return what parts are called together: one's name, with all layers for its own.

    Empty where their names do not begin and end alike.
    """
    begins, ends, layers = set(), set(), []
    for child in children:
        own = scope_in_name(child.tags.get("scope", ""))
        first, found, last = child.name.partition(f"-{own}-")
        begins.add(first)
        ends.add(last)
        layers += [int(each) for each in own.split("-") if each.isdigit()]
        if not (own and found):
            return ""
    if len(begins) != 1 or len(ends) != 1 or not layers:
        return ""
    return f"{begins.pop()}-layers-{min(layers)}-{max(layers)}-{ends.pop()}"


def _description(told: Mapping[str, object], words: Sequence[str]) -> str:
    """Return what the parent's page says of it: its command, and how its parts ended."""
    ended = [
        f"{count} {status.removeprefix('children.').replace('_', ' ')}"
        for status, count in told.items()
        if status.startswith("children.")
    ]
    command = f"{program()} {shlex.join(['-m', *words])}"
    return f"A sweep of {told['children']} parts: {', '.join(ended)}\n\n```sh\n{command}\n```"


def _summary(children: list[StoredRun], others: Mapping[str, int]) -> dict[str, object]:
    """Return how the parts ended, and the tags that all children share."""
    counts = Counter(child.status.lower() for child in children)
    counts.update({status.lower().replace(" ", "_"): count for status, count in others.items()})
    tags: dict[str, object] = {"children": len(children)}
    tags.update({f"children.{status}": count for status, count in sorted(counts.items()) if count})
    for name, source in _SHARED_TAGS.items():
        values = {child.tags.get(source, "") for child in children}
        if len(values) == 1 and values != {""}:
            tags[name] = values.pop()
    return tags
