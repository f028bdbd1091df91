"""Write a run to a folder or one file: for another machine, or for a compiled model to be fed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from layerparity.ground import console, progress
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import expanded
from layerparity.ground.program import program
from layerparity.ground.quoting import typed
from layerparity.settings.config import Config, RunKind
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store

# As ``run=``: all runs of the store.
EVERY = "all"


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("run", "to")


class ExportLayout(StrEnum):
    """How an export lies there: as runs, or as NxDI's tensor replacement takes tensors."""

    runs = "runs"
    nxdi = "nxdi"


@dataclass
class Settings:
    """conf/job/export.yaml."""

    name: str = "export"
    layout: ExportLayout = key(
        ExportLayout.runs, "runs, or nxdi: a golden's tensors, for tensor_replacement_config"
    )
    golden: bool = key(False, "export the golden run that a candidate was fed by, too")


def run(config: Config) -> Exit:
    """Export ``run=`` to ``to=``, a folder or a file that ends in .zip; say what was written."""
    from layerparity.record.exported import KINDS, ZIP, files_of, write_export
    from layerparity.tracking.opening import open_store

    if config.run is None:
        raise UserError("job=export wants to know what", "add run=, an id, a name, or latest.")
    store = open_store(config.tracking)
    # The latest is the newest golden, which is what is carried as a rule.
    every = config.run == EVERY
    runs = _every(store) if every else store.find(config.run, kind=RunKind.golden.value)
    for each in () if every else runs:
        if each.kind not in KINDS or not each.finished:
            what = each.kind or "folder of dumps"
            raise UserError(
                f"'{each.name}' is a {what} that is {each.status.lower()}",
                "name a finished golden or candidate run; a comparison's report.html is one file "
                "that can be sent as it is.",
            )
        each.read_manifest()
    if config.job.layout is ExportLayout.nxdi:
        return _replacement(runs, config)
    if config.job.golden:
        runs = [*_goldens_of(store, runs), *runs]
    to = expanded(config.to or f"{_usual(runs[-1], EVERY if every else '')}{ZIP}").absolute()
    files = [files_of(each) for each in runs]
    sizes = [path.stat().st_size for taken, _ in files for path in taken]
    with progress.shown("files", len(sizes), sizes) as bar:
        listed = write_export(runs, to, bar.step)
    for made, (taken, left) in zip(listed.runs, files, strict=True):
        size = console.bytes_text(sum(file.bytes for file in made.files.values()))
        console.say(f"{made.tags['kind']} {made.name} ({made.id[:8]}): {len(taken)} files, {size}")
        others = [path.name for path in left if not path.name.startswith(".")]
        if others:
            console.note(f"left out of {made.name}: {', '.join(others)}")
    console.say(f"exported to {to}\nelsewhere: {program()} job=import {typed('run', to.name)}")
    return Exit.OK


def _usual(run: StoredRun, called: str = "") -> str:
    """Return what an export is called where nobody says."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", called or run.name).strip(".-")[:80]
    # A name in another script leaves nothing.
    return plain or f"{run.kind}-{run.id[:8]}"


def _replacement(runs: Sequence[StoredRun], config: Config) -> Exit:
    """Write one golden's tensors for a compiled NxDI model to be fed; say how it takes them."""
    from layerparity.record.replacement import FILE, module_of, write_replacement

    if len(runs) != 1 or runs[0].kind != RunKind.golden.value or config.job.golden:
        raise UserError(
            "job.layout=nxdi wants one golden run",
            "name it: run=, its id, its name or latest; and leave job.golden out.",
        )
    golden = runs[0]
    folder = expanded(config.to or f"{_usual(golden)}-nxdi").absolute()
    count = sum(module_of(each.site) is not None for each in golden.read_manifest().records)
    with progress.shown("tensors", count) as bar:
        counts = write_replacement(golden, folder, bar.step)
    for module, count in counts.items():
        console.say(f"{module}: {count} tensors")
    console.say(
        f"exported to {folder}\nin neuron_config: tensor_replacement_config = "
        f"TensorReplacementConfig(ref_dir={str(folder)!r}, neuron_dir=..., tf_map=...), with "
        f"tf_map of {FILE}, its steps as numbers, and neuron_dir what the device itself captured "
        "of these modules"
    )
    return Exit.OK


def _every(store: Store) -> list[StoredRun]:
    """Return all finished golden and candidate runs, the oldest first, and say what stays.

    The next store counts them in this order, so that the newest run is the newest there, too.
    Raises UserError where there is none.
    """
    from layerparity.record.exported import KINDS

    runs, others = [], 0
    for each in reversed(store.every()):
        if each.kind not in KINDS or not each.finished:
            others += 1
            continue
        try:
            each.read_manifest()
            runs.append(each)
        except UserError as error:
            console.note(f"{each.name} ({each.id[:8]}) is left out: {error}")
    if not runs:
        raise UserError(f"No golden or candidate run in {store.config.place} finished", "make one.")
    if others:
        console.note(
            f"not exported: {others} that are sweeps, comparisons (made again from their runs) or "
            "runs that did not finish"
        )
    return runs


def _goldens_of(store: Store, runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the goldens that runs were fed by, or were last compared with. UserError for none."""
    ids: list[str] = []
    for each in runs:
        compared = store.get(each.tags.get("compared_in", ""))
        by = each.tags.get("inputs_from") or (compared.tags["golden"] if compared else "")
        ids += by.split()
    found = [store.get(each) for each in dict.fromkeys(ids)]
    golden = RunKind.golden.value
    goldens = [each for each in found if each is not None and each.kind == golden]
    if not goldens:
        raise UserError(
            f"No golden run is kept that '{runs[0].name}' was fed by or compared with",
            "leave job.golden out.",
        )
    there = {each.id for each in runs}
    return [each for each in goldens if each.id not in there]
