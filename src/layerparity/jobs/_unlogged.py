"""Unlogged: a run in a plain folder, for jobs that make hundreds and keep what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity import registry
from layerparity.config import Config
from layerparity.files import write_text
from layerparity.jobs import _keep
from layerparity.jobs import run as run_job
from layerparity.manifest import FILE_NAME

if TYPE_CHECKING:
    from layerparity.tracking.stored import StoredRun


def make_in(folder: Path, config: Config, store: Any) -> StoredRun:
    """Make one run in ``folder``, as ``job=run`` would, without tracking it.

    ``store`` is where goldens named in the configuration are looked up.
    """
    from layerparity.tracking.stored import from_folder

    backend = registry.load("backends", config.backend.name).build(config.backend, config)
    backend.open()
    try:
        prepared = run_job.prepare(config, backend, store)
        port = run_job.build_port(prepared)
        manifest, outcome = run_job.execute(prepared, port, folder, _keep.fingerprint(prepared))
        _keep.describe(prepared, folder, outcome)
        write_text(folder / FILE_NAME, manifest.to_json())
    finally:
        backend.close()
    return from_folder(folder)
