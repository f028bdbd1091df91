"""Write what a run leaves in its folder and in tracking: tags, keys, metrics, last the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.blocks import kinds_of
from layerparity.ground.resources import git_commit
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest, Record
from layerparity.run import open_port, terminal
from layerparity.run.fingerprint import model_print, numerics, versions
from layerparity.run.metrics import run_metrics
from layerparity.run.sweep import part
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.record.manifest import WeightPrint
    from layerparity.run.pass_result import PassResult
    from layerparity.run.prepare import Prepared


def run_name(prepared: Prepared) -> str:
    """Return a name that says what the run is."""
    config = prepared.config
    scope = prepared.scope.describe().replace(" ", "-").replace("..", "-")
    return f"{config.kind.value}-{config.backend.name}-{scope}"


def tags(prepared: Prepared, mark: str) -> dict[str, str]:
    """Return the tags a run is found and told apart by."""
    backend, config = prepared.backend, prepared.config
    return {
        "backend": backend.name,
        "device": backend.device_label,
        "scope": prepared.scope.describe(),
        "model": config.model.name,
        "model_type": str(prepared.checkpoint.config.get("model_type")),
        "config_digest": prepared.checkpoint.config_digest,
        "dtype": config.dtype.value,
        "port": open_port.label(config.port),
        "feed": config.feed.value,
        "inputs": prepared.inputs.source,
        **({"inputs_from": " ".join(prepared.inputs.runs)} if prepared.inputs.runs else {}),
        **({"part": part()} if part() else {}),
        "fingerprint": mark,
        "git_commit": git_commit(),
        "synthetic": str(prepared.inputs.synthetic).lower(),
        **{f"version.{name}": version for name, version in versions().items()},
        **{f"fact.{name}": value for name, value in backend.facts().items()},
    }


def params(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain values."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def manifest(prepared: Prepared, result: PassResult, records: list[Record], mark: str) -> Manifest:
    """Return the manifest of a finished execution."""
    config = prepared.config
    return Manifest(
        model=model_print(prepared),
        kind=config.kind.value,
        backend=prepared.backend.name,
        device=prepared.backend.device_label,
        port=open_port.label(config.port),
        dtype=config.dtype.value,
        scope=prepared.scope.to_dict(),
        feed=config.feed.value,
        fingerprint=mark,
        synthetic=prepared.inputs.synthetic,
        stages=list(prepared.scope.stages),
        inputs=prepared.inputs.hashes(),
        feeds=result.feeds,
        weights=result.weights,
        numerics=numerics(prepared),
        capture=prepared.wanted,
        records=records,
        skipped=result.skipped,
        **layers_of(prepared.checkpoint),
        reference=result.reference,
        blocks=kinds_of(result.blocks),
    )


def finish(
    prepared: Prepared,
    active: Any,
    made: Manifest,
    result: PassResult,
    *,
    seconds: float,
    whole: float,
) -> None:
    """Write everything that describes the run; the manifest last, which makes it whole.

    ``seconds`` are those of the stages, ``whole`` with all that came before them.
    Raises UserError where the disk refuses.
    """
    describe(prepared, active.folder, result)
    active.log_metrics(run_metrics(made, result, seconds))
    active.set_tags({f"fact.{name}": value for name, value in prepared.backend.facts().items()})
    RunFolder(active.folder).write_manifest(made)
    terminal.say_run(made, result, seconds, whole)


def describe(prepared: Prepared, folder: Path, result: PassResult) -> None:
    """Write what describes a run beside its tensors, the manifest apart."""
    files = RunFolder(folder)
    files.write_inputs(prepared.inputs.tensors())
    if prepared.inputs.texts:
        files.write_prompts(prepared.inputs.texts)
    files.write_used_weights(result.tensors_used)
    files.write_profile(result.profile)
    files.write_effective_weights(result.effective)
    files.write_config(params(prepared.config))
    if result.new_tokens is not None:
        terminal.texts(prepared, folder, result.new_tokens)
    if prepared.backend.warnings:
        files.write_warnings(prepared.backend.warnings)


def held_against(
    checkpoint: Checkpoint, effective: Mapping[str, Mapping[str, WeightPrint]]
) -> dict[str, dict[str, WeightPrint]]:
    """Return the prints of each stage's weights, each with what the checkpoint says to it."""
    from layerparity.model.prints import against

    return {stage: against(checkpoint, held) for stage, held in effective.items()}


def layers_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the manifest's fields about the model's layers: their classes and their experts."""
    from layerparity.model.layer_classes import layer_classes

    classes, experts = layer_classes(checkpoint.config)
    return {"layer_classes": classes, "layer_experts": experts}
