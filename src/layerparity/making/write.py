"""Write what a run leaves in its folder and in tracking: tags, keys, metrics, last the manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.blocks import Blocks, by_layer, kinds_of
from layerparity.anatomy.site import Kind, Site
from layerparity.ground import console
from layerparity.ground.profile import RunProfile, StageProfile
from layerparity.ground.resources import git_commit
from layerparity.making import terminal
from layerparity.making.fingerprint import model_print, numerics, numerics_elsewhere, versions
from layerparity.making.names import port_in_name, scope_in_name
from layerparity.making.sweep import part
from layerparity.ports import port_loads
from layerparity.ports.opening import open_port
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest, Record, WeightPrint
from layerparity.record.stored_run import MANIFEST_TAG, OFF_TAG, off_text
from layerparity.settings.command_keys import settings_of
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.making.pass_result import PassResult
    from layerparity.making.prepare import Prepared

_MB = 1e6
_BLOCK = "block"


def run_name(prepared: Prepared) -> str:
    """Return a name that says what the run is: of which model, how much, in which type, and where.

    Such as ``candidate-tiny_minimax_m2-single-0-bfloat16-xla-cpu``.
    """
    config = prepared.config
    scope = scope_in_name(prepared.scope.describe())
    model = config.model.label.rpartition("/")[2]
    device = re.sub(r"\W+", "-", prepared.backend.device_label.partition(",")[0]).strip("-")
    parts = [config.kind.value, model, scope, config.dtype.value, device.lower()]
    port = port_in_name(open_port.label(config.port))
    return "-".join([*parts, *([port] if port else [])])


def tags(prepared: Prepared, mark: str) -> dict[str, str]:
    """Return the tags a run is found and told apart by."""
    backend, config, words = prepared.backend, prepared.config, part()
    return {
        "backend": backend.name,
        "device": backend.device_label,
        "scope": prepared.scope.describe(),
        "model": config.model.label,
        "model_type": str(prepared.checkpoint.config.get("model_type")),
        "config_digest": prepared.checkpoint.config_digest,
        "dtype": config.dtype.value,
        "port": open_port.label(config.port),
        "feed": config.feed.value,
        "inputs": prepared.inputs.source,
        **({"inputs_from": " ".join(prepared.inputs.runs)} if prepared.inputs.runs else {}),
        **({"part": words} if words else {}),
        "fingerprint": mark,
        "git_commit": git_commit(),
        "synthetic": str(prepared.inputs.synthetic).lower(),
        **{f"version.{name}": version for name, version in versions().items()},
        # Of a port of one's own it is not known yet whether it computes there.
        **(_facts(prepared) if open_port.is_ours(config.port) else {}),
    }


def _facts(prepared: Prepared) -> dict[str, str]:
    return {f"fact.{name}": value for name, value in prepared.backend.facts().items()}


def computed_on(prepared: Prepared, result: PassResult) -> tuple[str, bool]:
    """Return a label for what a run was computed on, and whether its backend's device was in it.

    That is where the stages' outputs lay, or what the port says of itself.
    """
    backend, said = prepared.backend, result.computed_on
    own = backend.device_types
    strange = sorted(result.devices - own) if own else []
    inside = not strange or bool(result.devices & own)
    if said:
        return f"{said}, as its port says", inside
    labels = [*([backend.device_label] if inside else []), *strange]
    return " and ".join(labels), inside


def params(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain values."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def _plain(value: object) -> object:
    """Return what OmegaConf's to_container of such a structure gives, in a tenth of the time."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def shown_params(config: Config) -> dict[str, Any]:
    """Return the keys that tell runs apart in a table: the main ones, and all that were changed.

    The whole configuration is in config.yaml.
    """
    main = {
        "kind": config.kind.value,
        "backend": config.backend.name,
        "model": config.model.label,
        "scope": config.scope.kind.value,
        "device_map": config.device_map.strategy,
        "dtype": config.dtype.value,
        "inputs": config.inputs.name,
        "port": open_port.label(config.port),
        "tp_degree": config.tp_degree,
        "feed": config.feed.value,
        "capture": config.capture.name,
    }
    changed = {k.lstrip("+"): v for k, v in settings_of(params(config)).items()}
    elsewhere = [key for key in changed if key.partition(".")[0] == "tracking"]
    return {**{k: v for k, v in changed.items() if k not in elsewhere}, **main}


def dataset(prepared: Prepared) -> tuple[str, str, dict[str, Any]]:
    """Return name, digest and source of what the run was fed, for MLflow's column Dataset.

    The digest is that of the token ids, or of the positions where hidden states are fed.
    """
    inputs = prepared.inputs
    rows, tokens = inputs.attention_mask.shape
    hashes = inputs.hashes()
    source = {"inputs": inputs.source, "runs": list(inputs.runs), "hashes": hashes}
    digest = hashes.get("token_ids", hashes["position_ids"])
    return f"{inputs.source} {rows}x{tokens}", digest, source


def manifest_of(
    prepared: Prepared, result: PassResult, records: list[Record], mark: str
) -> Manifest:
    """Return the manifest of a finished execution."""
    from layerparity.model.layer_classes import layer_classes
    from layerparity.model.mechanisms import mechanisms_of

    config = prepared.config
    device, inside = computed_on(prepared, result)
    classes, experts = layer_classes(prepared.checkpoint.config)
    return Manifest(
        model=model_print(prepared),
        kind=config.kind.value,
        backend=prepared.backend.name,
        device=device,
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
        numerics=numerics(prepared) if inside else numerics_elsewhere(config),
        capture=prepared.wanted,
        records=records,
        skipped=result.skipped,
        layer_classes=classes,
        layer_experts=experts,
        mechanisms=mechanisms_of(prepared.checkpoint.config),
        reference=result.reference,
        blocks=kinds_of(result.blocks),
        values_of=prepared.inputs.values_of,
        ranks=result.ranks,
        kept=prepared.inputs.kept,
    )


def finish(
    prepared: Prepared,
    active: Any,
    manifest: Manifest,
    result: PassResult,
    *,
    seconds: float,
    whole: float,
    system: Sequence[tuple[str, float, int]] = (),
) -> str:
    """Write everything that describes the run; the manifest last, which makes it whole.

    Returns why a golden cannot be believed, or nothing. ``seconds`` are those of the stages,
    ``whole`` with all that came before them; ``system`` are the points of the machine meanwhile.
    Raises UserError where the disk refuses.
    """
    files = RunFolder(active.folder)
    describe(prepared, files, result)
    _, inside = computed_on(prepared, result)
    found = {"device": manifest.device, **(_facts(prepared) if inside else {})}
    active.log_metrics([*run_metrics(manifest, result, seconds), *system], found)
    if manifest.device != prepared.backend.device_label:
        console.note(
            f"The stages computed on {manifest.device}, and the backend's device is "
            f"{prepared.backend.device_label}: the run is filed under the former"
            f"{'' if inside else ', without the flags of the latter'}."
        )
    off = _first_off(manifest, result)
    active.set_tags({**off, MANIFEST_TAG: files.write_manifest(manifest)})
    terminal.say_run(manifest, result, seconds, whole)
    return off_text(off)


def _first_off(manifest: Manifest, result: PassResult) -> dict[str, str]:
    """Return the tag of a golden that is off its own reference: the first place, and how far."""
    blocks = Blocks.of(manifest.model.model_type, by_layer(manifest.blocks))
    first = next(iter(blocks.sorted(result.off)), None)
    return {} if first is None else {OFF_TAG: f"{first} {result.off[first]:.3g}"}


def describe(prepared: Prepared, files: RunFolder, result: PassResult) -> None:
    """Write what describes a run beside its tensors, the manifest apart."""
    files.write_inputs(prepared.inputs.tensors())
    if prepared.inputs.texts:
        files.write_prompts(prepared.inputs.texts)
    files.write_used_weights(result.tensors_used)
    files.write_profile(result.profile)
    files.write_effective_weights(result.effective)
    files.write_config(params(prepared.config))
    keep_loaded(files)
    if result.new_tokens is not None:
        terminal.texts(prepared, files, result.new_tokens)
    if prepared.backend.warnings:
        files.write_warnings(prepared.backend.warnings)


def keep_loaded(files: RunFolder) -> None:
    """Write what ports of one's own loaded in this process, if there was one."""
    loaded = port_loads.now()
    if loaded is not None:
        files.write_loaded(loaded)


def run_metrics(
    manifest: Manifest, result: PassResult, seconds: float
) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of a finished run; ``seconds`` are those of its stages."""
    yield from site_metrics(manifest)
    yield from profile_metrics(result.profile)
    yield from moved_metrics(result.effective)
    yield "summary/seconds", seconds, 0


def moved_metrics(
    effective: Mapping[str, Mapping[str, WeightPrint]],
) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of how far quantising moved a block's weights: the largest."""
    for stage, prints in effective.items():
        moved = [each.moved for each in prints.values() if each.moved]
        layer = Site(stage, "in").layer
        if moved and layer is not None:
            yield "layer/weights moved by quantising", max(moved), layer


def site_metrics(manifest: Manifest) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of the sites of a run, by layer, and how many there are."""
    for record in manifest.records:
        layer = record.site.layer
        # Numbers of experts are no sizes.
        if layer is None or record.site.phase != "prefill" or record.kind is not Kind.REAL:
            continue
        label = (record.site.component or _BLOCK) + f".{record.site.end}"
        yield f"layer/{label} rms", record.stats["rms"], layer
        largest = max(abs(record.stats["min"]), abs(record.stats["max"]))
        yield f"layer/{label} max abs", largest, layer
    broken = sum(r.stats["nan"] + r.stats["inf"] for r in manifest.records)
    yield "summary/sites", float(len(manifest.records)), 0
    yield "summary/nan and inf", broken, 0


def profile_metrics(profile: RunProfile) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of every stage; a block's step is its layer."""
    # What was run of one block counts together.
    places: dict[tuple[str, int], StageProfile] = {}
    for index, (stage, each) in enumerate(profile.stages.items()):
        layer = Site(stage, "in").layer
        place = (stage, index) if layer is None else (_BLOCK, layer)
        places.setdefault(place, StageProfile())
        places[place] += each
    for (where, step), each in places.items():
        yield f"time/{where} ms", each.seconds * 1000, step
        if where != _BLOCK:
            continue
        parts = {
            "wait for weights": each.wait,
            "read": each.loading.read,
            "convert": each.loading.convert,
            "hash": each.loading.hash,
            "fingerprint": each.fingerprint,
            "compute": each.compute,
            "reference": each.reference,
            "store": each.store,
        }
        for name, seconds in parts.items():
            yield f"profile/{name} ms", seconds * 1000, step
        yield "profile/read MB", each.loading.bytes / _MB, step
        yield "profile/memory peak MB", each.peak / _MB, step
    yield "summary/read MB", sum(each.loading.bytes for each in profile.stages.values()) / _MB, 0
    peak = max(each.peak for each in profile.stages.values())
    yield "summary/memory peak MB", (peak - profile.before) / _MB, 0
