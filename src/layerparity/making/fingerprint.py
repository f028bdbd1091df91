"""A run's fingerprint: all that determines its numbers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from layerparity import __version__
from layerparity.ground.files import text_digest
from layerparity.ground.resources import git_commit
from layerparity.machine import neuron
from layerparity.model.architecture import usual_attention
from layerparity.ports.observed import emulated
from layerparity.ports.opening import open_port
from layerparity.ports.replay_keys import ALL, replays
from layerparity.record.manifest import OPERANDS, ORIGINAL, ModelPrint
from layerparity.settings.config import Config, RunKind

if TYPE_CHECKING:
    from layerparity.making.prepare import Prepared, RunPlan
    from layerparity.model.checkpoint import Checkpoint

VERSIONED = ("torch", "transformers", "accelerate", "safetensors", "mlflow", "torch_xla")


def model_print(prepared: RunPlan) -> ModelPrint:
    """Return what identifies the run's model."""
    checkpoint = prepared.checkpoint
    return ModelPrint(
        prepared.config.model.label,
        str(checkpoint.config.get("model_type")),
        prepared.num_layers,
        checkpoint.config_digest,
    )


def numerics(prepared: Prepared) -> dict[str, str]:
    """Return every setting that can change the numbers of a run on its backend's device."""
    config, backend = prepared.config, prepared.backend
    attention = (
        config.attn_implementation
        or prepared.family.attention
        or backend.attn_implementation
        or usual_attention(prepared.checkpoint.config.get("model_type"))
    )
    return {
        "attn_implementation": attention,
        "experts_implementation": str(
            config.experts_implementation or backend.experts_implementation
        ),
        "tp_degree": str(config.tp_degree),
        **({"moe_ep_degree": str(config.moe_ep_degree)} if config.moe_ep_degree > 1 else {}),
        **numerics_elsewhere(config),
        **backend.numerics(),
    }


def numerics_elsewhere(config: Config) -> dict[str, str]:
    """Return those settings of a run that are none of its backend's."""
    asked = replays(config)
    replayed = {"replay": "golden, with weights" if asked == ALL else "golden"} if asked else {}
    replayed |= {"forced": "golden"} if config.generate.forced else {}
    steps = {"max_new_tokens": str(config.generate.max_new_tokens)}
    original = {ORIGINAL: config.model.original} if config.model.original else {}
    return {**steps, **replayed, **original, **of_operands(config), **emulated.numerics(config)}


def of_operands(config: Config) -> dict[str, str]:
    """Return what a candidate's products round their operands to, if they do.

    A golden's do not: it has floors for those that do.
    """
    if not config.operands or config.kind is not RunKind.candidate:
        return {}
    return {OPERANDS: " ".join(map(str, config.operands))}


def fingerprint_of(prepared: Prepared) -> str:
    """Return the hash of everything that determines a run's numbers.

    Of the checkpoint's files, size and times stand for their bytes, as their headers were read.
    """
    config, adapter = prepared.config, prepared.checkpoint.adapter
    # A candidate computes nothing beside itself.
    dtypes = {"dtypes": [dtype.value for dtype in config.reference.dtypes]}
    operands = {OPERANDS: [*map(str, config.operands)]} if config.operands else {}
    beside = asdict(config.reference) | dtypes | operands
    reference = beside if config.kind is RunKind.golden else {}
    return text_digest(
        json.dumps(
            {
                "version": __version__,
                "model": asdict(replace(model_print(prepared), name="")),
                "files": _files(prepared.checkpoint),
                **({"original": _files(prepared.original)} if prepared.original else {}),
                **({"adapter": dict(adapter.settings)} if adapter else {}),
                "inputs": prepared.inputs.hashes(),
                "given": sorted(str(site) for site in prepared.inputs.given),
                "origin": prepared.inputs.origin,
                **({"own": prepared.inputs.values_of} if prepared.inputs.values_of else {}),
                "stages": prepared.scope.stages,
                "kind": config.kind.value,
                "dtype": config.dtype.value,
                "port": open_port.identity(config.port),
                "device": prepared.backend.device_label,
                "feed": config.feed.value,
                "numerics": numerics(prepared),
                # Observing a compiled graph changes its fusion.
                "capture": asdict(prepared.wanted),
                **({"kept": asdict(prepared.inputs.kept)} if prepared.inputs.kept else {}),
                "reference": reference,
                "threads": config.threads,
                "git_commit": git_commit(),
                "versions": versions(),
            },
            sort_keys=True,
        )
    )


def _files(checkpoint: Checkpoint) -> list[tuple[str | int, ...]]:
    """Return names, sizes and times of the files that a checkpoint is read from."""
    return [(each.file.name, *each.stamp) for each in checkpoint.sources]


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide numbers; absent ones are left out.

    So are placeholders of AWS's packages, which compute nothing.
    """
    aws = [neuron.PACKAGES[name] for name, real in neuron.packages().items() if real]
    found = {name: _version(name, tuple(sys.path)) for name in (*VERSIONED, *aws)}
    return {name: version for name, version in found.items() if version is not None}


# Every run asks twice, and what is imported stays what it was.
@cache
def _version(package: str, path: tuple[str, ...]) -> str | None:
    """Return a package's version, as it is found on this path; None for an absent one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
