"""Keep: what a run leaves in tracking: names, tags, parameters, manifest, metrics, texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from layerparity import __version__, console
from layerparity.config import Config, RunKind
from layerparity.errors import UserError
from layerparity.files import sha256_text, whole_file, write_text
from layerparity.inputs import golden as golden_inputs
from layerparity.manifest import FILE_NAME, INPUTS_FILE, PROMPTS_FILE, Manifest, ModelPrint, Record
from layerparity.revision import git_commit

if TYPE_CHECKING:
    from layerparity.execute import Outcome
    from layerparity.jobs.run import Prepared

VERSIONED = ("torch", "transformers", "accelerate", "safetensors", "mlflow", "torch_xla")


def model_print(prepared: Prepared) -> ModelPrint:
    """Return what identifies the run's model."""
    checkpoint = prepared.checkpoint
    return ModelPrint(
        prepared.config.model.name,
        str(checkpoint.config.get("model_type")),
        int(checkpoint.config["num_hidden_layers"]),
        checkpoint.config_sha256,
    )


def numerics(prepared: Prepared) -> dict[str, str]:
    """Return every setting that can change the numbers of a run."""
    config, backend = prepared.config, prepared.backend
    return {
        "capture": prepared.wanted.fingerprint(),
        "attn_implementation": config.attn_implementation or backend.attn_implementation,
        "experts_implementation": str(
            config.experts_implementation or backend.experts_implementation
        ),
        "tp_degree": str(config.tp_degree),
        "max_new_tokens": str(config.generate.max_new_tokens),
        **backend.numerics(),
    }


def fingerprint(prepared: Prepared) -> str:
    """Return the hash of everything that determines a run's numbers."""
    files = sorted({stored.file for stored in prepared.checkpoint.tensors.values()})
    return sha256_text(
        json.dumps(
            {
                "version": __version__,
                "model": asdict(model_print(prepared)),
                "files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files],
                "inputs": prepared.inputs.hashes(),
                "given": sorted(str(site) for site in prepared.inputs.given),
                "origin": prepared.inputs.origin,
                "stages": prepared.scope.stages,
                "kind": prepared.config.kind.value,
                "dtype": prepared.config.dtype.value,
                "port": prepared.config.port.name,
                "device": prepared.backend.device_label,
                "feed": prepared.config.feed.value,
                "numerics": numerics(prepared),
                "threads": prepared.config.threads,
                "git_commit": git_commit(),
                "versions": versions(),
            },
            sort_keys=True,
        )
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide numbers; absent ones are left out."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def golden_for(store: Any, reference: str | None, checkpoint: Any, request: Any) -> Any:
    """Return the golden run asked for, or the newest that holds the scope's inputs, or None.

    A golden in the run's own dtype is preferred to a newer one in another.
    """
    if reference is not None and reference != "latest":
        found = store.find(reference, kind=RunKind.golden.value)
        return found[0] if found else None
    fitting = (
        run
        for run in store.runs(kind=RunKind.golden.value, limit=50)
        if run.finished and _feeds(run, checkpoint, request)
    )
    other = None
    for run in fitting:
        if run.tags.get("dtype") == request.config.dtype.value:
            return run
        other = other or run
    return other


def _feeds(run: Any, checkpoint: Any, request: Any) -> bool:
    """Say whether a run is of this architecture and recorded what the scope is fed."""
    try:
        made = Manifest.read(run.file(FILE_NAME).parent)
    except UserError as error:
        console.say(f"note: golden run {run.name} is passed over: {error}")
        return False
    same = made.model.config_sha256 == checkpoint.config_sha256
    return same and golden_inputs.covers(made, request)


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
        "config_sha256": prepared.checkpoint.config_sha256,
        "dtype": config.dtype.value,
        "port": config.port.name,
        "feed": config.feed.value,
        "inputs": prepared.inputs.source,
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


def manifest(prepared: Prepared, outcome: Outcome, records: list[Record], mark: str) -> Manifest:
    """Return the manifest of a finished execution."""
    config = prepared.config
    return Manifest(
        model=model_print(prepared),
        kind=config.kind.value,
        backend=prepared.backend.name,
        device=prepared.backend.device_label,
        port=config.port.name,
        dtype=config.dtype.value,
        scope=prepared.scope.to_dict(),
        feed=config.feed.value,
        fingerprint=mark,
        synthetic=prepared.inputs.synthetic,
        stages=list(prepared.scope.stages),
        inputs=prepared.inputs.hashes(),
        feeds=outcome.feeds,
        weights=outcome.weights,
        numerics=numerics(prepared),
        records=records,
        skipped=outcome.skipped,
    )


def finish(
    prepared: Prepared, active: Any, made: Manifest, outcome: Outcome, seconds: float
) -> None:
    """Write everything that describes the run; the manifest last, which makes it whole."""
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    folder = active.folder
    with whole_file(folder / INPUTS_FILE) as part:
        save_file({n: t.contiguous() for n, t in prepared.inputs.tensors().items()}, part)
    if prepared.inputs.texts:
        write_text(folder / PROMPTS_FILE, json.dumps(prepared.inputs.texts, ensure_ascii=False))
    write_text(folder / "weights.json", json.dumps(outcome.tensors_used, indent=1))
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(params(prepared.config))))
    if outcome.new_tokens is not None:
        _texts(prepared, active, outcome.new_tokens)
    warn = prepared.backend.warnings
    if warn:
        write_text(folder / "warnings.txt", "\n".join(warn) + "\n")
    active.log_metrics(_metrics(made, outcome, seconds))
    active.set_tags({f"fact.{name}": value for name, value in prepared.backend.facts().items()})
    _closing_table(made, outcome, seconds)
    write_text(folder / FILE_NAME, made.to_json())


def _metrics(made: Manifest, outcome: Outcome, seconds: float) -> Iterator[tuple[str, float, int]]:
    for record in made.records:
        layer = record.site.layer
        if layer is None or record.site.phase != "prefill":
            continue
        label = (record.site.component or "block") + f".{record.site.end}"
        yield f"layer/{label} rms", record.stats["rms"], layer
        largest = max(abs(record.stats["min"]), abs(record.stats["max"]))
        yield f"layer/{label} max abs", largest, layer
    for index, (stage, spent) in enumerate(outcome.seconds.items()):
        tail = stage.removeprefix("layers.").split(".")[0]
        step = int(tail) if tail.isdigit() else index
        yield f"time/{'block' if tail.isdigit() else stage} ms", spent * 1000, step
    broken = sum(r.stats["nan"] + r.stats["inf"] for r in made.records)
    yield "summary/sites", float(len(made.records)), 0
    yield "summary/nan and inf", broken, 0
    yield "summary/seconds", seconds, 0


def _closing_table(made: Manifest, outcome: Outcome, seconds: float) -> None:
    rows = []
    for stage in made.stages:
        held = [r for r in made.records if r.file == f"tensors/{stage}.safetensors"]
        out = next((r for r in held if r.site.path == stage and r.site.end == "out"), None)
        bad = sum(int(r.stats["nan"] + r.stats["inf"]) for r in held)
        rms = f"{out.stats['rms']:.4g}" if out else "-"
        rows.append((stage, len(held), rms, bad or "-", f"{outcome.seconds[stage]:.2f}"))
    shown = rows if len(rows) <= 24 else [*rows[:12], ("...",) * 5, *rows[-11:]]
    columns = ("stage", "sites", "output rms", "NaN/Inf", "seconds")
    console.table(f"{len(made.records)} sites in {seconds:.1f} s", columns, shown)


def _texts(prepared: Prepared, active: Any, tokens: Any) -> None:
    from layerparity.inputs.prompt import load_tokenizer

    try:
        tokenizer = load_tokenizer(prepared.checkpoint.folder)
    except UserError as error:
        console.say(f"The new tokens stay numbers: {error}")
        return
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens.tolist()]
    prompts = prepared.inputs.texts or [""] * len(texts)
    pairs = [{"prompt": p, "generated": t} for p, t in zip(prompts, texts, strict=False)]
    write_text(active.folder / "generated.json", json.dumps(pairs, indent=1, ensure_ascii=False))
    for pair in pairs:
        console.say(f"generated: {pair['prompt']}|{pair['generated']}")
