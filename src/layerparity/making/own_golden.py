"""Make the golden that is fed a candidate's own values, from the candidate's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.making import imported, steps
from layerparity.ports.opening import open_backend
from layerparity.record.folder import CONFIG
from layerparity.settings.command_keys import settings_of
from layerparity.settings.config import LATEST, Config, FeedMode, RunKind

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store

# What a golden shares with the candidate whose values it is fed.
_SHARED = ("model", "dtype", "operands", "scope", "layer", "start", "end", "component", "generate")
# A candidate that shows nothing of its blocks: a chain of the same tokens is its golden.
_CHAINED = {"feed": FeedMode.chained.value}
# What the command may say of a golden: where it runs, and what it computes beside itself.
_OWN = ("attn_implementation", "backend", "device_map", "experts_implementation", "max_memory",
        "model", "offload_folder", "reference", "threads", "tracking")  # fmt: skip


def own_golden(config: Config, store: Store) -> tuple[Sequence[StoredRun], Sequence[StoredRun]]:
    """Return the goldens fed a candidate's own values, made or reused, and the candidate's runs.

    Each run of a sweep has a golden of its own. Raises UserError where the command names a golden
    as well, where a candidate kept no keys, and where its values cannot be fed.
    """
    if config.golden is not None:
        raise UserError(
            "golden= would do nothing: job.own_inputs=true makes a golden of the candidate's own "
            "values. Leave one of them out."
        )
    found = store.find(config.candidate or LATEST, kind=RunKind.candidate.value)
    candidate = [_kept(run, config, store) for run in found]
    return [_golden_of(run, config, store) for run in candidate], candidate


def _kept(run: StoredRun, config: Config, store: Store) -> StoredRun:
    """Return a run, or a folder of dumps kept as one: what its values were computed from is fed."""
    if run.id or run.files.is_run:
        return run
    names = Path(config.job.candidate_names).absolute() if config.job.candidate_names else None
    return imported.keep(run.folder, names, config, store, config.job.engine, again=True)


def _golden_of(run: StoredRun, config: Config, store: Store) -> StoredRun:
    if not run.finished:
        raise UserError(f"Run '{run.name}' is {run.status.lower()}: wait for it, or run it again.")
    stored = run.files.read_config() if run.id or run.files.is_run else None
    if not stored:
        raise UserError(
            f"'{run.name}' kept no {CONFIG}: make the golden with inputs=candidate inputs.run=, "
            "and the model, scope and dtype of the candidate."
        )
    shared = {k: v for k, v in settings_of(stored).items() if k.partition(".")[0] in _SHARED}
    own = {k: v for k, v in steps.own_settings(config).items() if k.partition(".")[0] in _OWN}
    if any(key.partition(".")[0] == "model" for key in own):
        shared = {k: v for k, v in shared.items() if k.partition(".")[0] != "model"}
    here = {} if open_backend.affinity(config.backend.name).score > 1 else {"device_map": "cpu"}
    fed = {"kind": "golden", "inputs": "candidate", "inputs.run": run.reference}
    if not any(each.site.layer is not None for each in run.files.read_manifest().records):
        fed |= _CHAINED
    return steps.make(store, "", {**shared, **here, **own, **fed})
