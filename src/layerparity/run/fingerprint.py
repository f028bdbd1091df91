"""A run's fingerprint: all that determines its numbers; and a stored run that has the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from layerparity import __version__
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import inside, text_digest
from layerparity.ground.resources import git_commit
from layerparity.model.header import read_header
from layerparity.record.folder import INPUTS, MANIFEST
from layerparity.record.manifest import Manifest, ModelPrint
from layerparity.run import open_port
from layerparity.run.inputs._replay import replays
from layerparity.settings.config import RunKind
from layerparity.settings.tracking import EMBEDDED

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.run.prepare import Prepared
    from layerparity.tracking.store import Store

VERSIONED = ("torch", "transformers", "accelerate", "safetensors", "mlflow", "torch_xla")


def model_print(prepared: Prepared) -> ModelPrint:
    """Return what identifies the run's model."""
    checkpoint = prepared.checkpoint
    return ModelPrint(
        prepared.config.model.name,
        str(checkpoint.config.get("model_type")),
        prepared.num_layers,
        checkpoint.config_digest,
    )


def numerics(prepared: Prepared) -> dict[str, str]:
    """Return every setting that can change the numbers of a run."""
    config, backend = prepared.config, prepared.backend
    usual = prepared.family.attention or backend.attn_implementation
    return {
        "attn_implementation": config.attn_implementation or usual,
        "experts_implementation": str(
            config.experts_implementation or backend.experts_implementation
        ),
        "tp_degree": str(config.tp_degree),
        "max_new_tokens": str(config.generate.max_new_tokens),
        **({"replay": "golden"} if replays(config) else {}),
        **backend.numerics(),
    }


def fingerprint_of(prepared: Prepared) -> str:
    """Return the hash of everything that determines a run's numbers.

    Of the checkpoint's files, size and times stand for their bytes, as their headers were read.
    """
    config = prepared.config
    # A candidate computes nothing beside itself.
    dtypes = {"dtypes": [dtype.value for dtype in config.reference.dtypes]}
    reference = asdict(config.reference) | dtypes if config.kind is RunKind.golden else {}
    return text_digest(
        json.dumps(
            {
                "version": __version__,
                "model": asdict(model_print(prepared)),
                "files": [(h.file.name, *h.stamp) for h in prepared.checkpoint.headers],
                "inputs": prepared.inputs.hashes(),
                "given": sorted(str(site) for site in prepared.inputs.given),
                "origin": prepared.inputs.origin,
                "stages": prepared.scope.stages,
                "kind": config.kind.value,
                "dtype": config.dtype.value,
                "port": open_port.identity(config.port),
                "device": prepared.backend.device_label,
                "feed": config.feed.value,
                "numerics": numerics(prepared),
                # Observing a compiled graph changes its fusion.
                "capture": asdict(prepared.wanted),
                "reference": reference,
                "threads": config.threads,
                "git_commit": git_commit(),
                "versions": versions(),
            },
            sort_keys=True,
        )
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide numbers; absent ones are left out."""
    present = {}
    for name in VERSIONED:
        try:
            present[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return present


def reusable(store: Store, fingerprint: str) -> StoredRun | None:
    """Return the newest finished run with this fingerprint whose artifacts are whole, or None.

    Whole means: the manifest can be read, and every file that it lists is there, as long as its own
    header says, with the listed tensors. Bytes are not read; a comparison checks them. On a server
    only the manifest is looked at.
    """
    stored = store.by_fingerprint(fingerprint)
    if stored is None:
        return None
    try:
        manifest = stored.read_manifest()
        if manifest.fingerprint != fingerprint:
            raise UserError(f"its {MANIFEST} is another run's")
        if store.config.name == EMBEDDED:
            _check_files(stored, manifest)
    except UserError as error:
        console.note(f"run {stored.name} ({stored.id[:8]}) is not reused: {error}")
        return None
    return stored


def _check_files(run: Any, manifest: Manifest) -> None:
    listed: dict[str, set[tuple[str, tuple[int, ...]]]] = {INPUTS: set()}
    for record in manifest.records:
        listed.setdefault(record.file, set()).add((str(record.site), record.shape))
    for name, tensors in listed.items():
        path = inside(run.folder, name)
        if not path.is_file():
            raise UserError(f"{name} is gone.")
        present = {(each.name, each.shape) for each in read_header(path).tensors}
        lost = sorted(site for site, _ in tensors - present)
        if lost:
            raise UserError(f"{name} does not hold {lost[0]}.")
