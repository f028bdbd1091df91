"""Glosses: what each dotted key does, in a few words, for the help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

from layerparity.ground import registry
from layerparity.settings.config import PLUGIN_GROUPS, Config

# A key without a line here is shown with its default all the same.
GLOSSES = {
    "audit.deep": "read every weight as well: NaN, all-zero, constant, out of family",
    "backend.compile": "gpu: torch.compile; neuron: lazy, or export to one graph",
    "backend.excess_precision": "let XLA compute 16-bit types wider between operations",
    "backend.runtime": "how to reach the device: auto takes what is there",
    "capture.exclude": "shell patterns of sites that are not stored, such as ['mlp.*']",
    "capture.include": "shell patterns of sites that are stored",
    "generate.max_new_tokens": "tokens to generate greedily after the prompt; wants scope=full",
    "inputs.batch": "sequences in a batch",
    "inputs.file": "token ids: JSON, .npy or .safetensors",
    "inputs.run": "the golden whose recorded inputs are fed: id, name or folder",
    "inputs.scale": "standard deviation of the hidden states",
    "inputs.seed": "seed of the values",
    "job.bad": "keys of a configuration that is wrong: {dtype:bfloat16,threads:1}",
    "job.candidate_names": "name map of a folder of dumps, a JSON file",
    "job.clean": "run the clean variants, which must raise no alarm",
    "job.dtypes": "floating types to plant faults in",
    "job.faults": "faults to plant; empty: all",
    "job.golden_names": "name map of a folder of dumps, a JSON file",
    "job.good": "keys of a configuration that is right: {dtype:float32}",
    "job.host": "address to serve at; loopback only",
    "job.known": "plant the known faults",
    "job.margin": "factor of the largest value seen that a limit lets pass",
    "job.models": "models to plant faults in",
    "job.mutations": "how many random faults to plant as well",
    "job.port": "port of the MLflow UI",
    "job.runs": "comparisons known to be good: [id,...]",
    "job.seed": "seed of the random faults",
    "job.steps": "commands that an experiment runs one after the other",
    "job.strategy": "how to look for the block: auto, scan, binary or inject",
    "model.architecture": "values of config.json, where there is no folder",
    "model.path": "folder of a Hugging Face checkpoint",
    "model.prompt": "what the model is asked where the command gives no prompt",
    "model.shipped": "a checkpoint that comes with layerparity",
    "plan.devices": "devices to pretend, such as 8x80GB; null: this machine's",
    "port._target_": "a port of your own: their.module.Port",
    "port.index": "which of the seed's random faults",
    "port.layers": "blocks that get the fault: [0,3]; null: all",
    "port.name": "which fault, or which clean way",
    "port.replay": "route tokens as the golden did, so that only arithmetic is left",
    "port.seed": "a random fault of this seed, instead of a named one",
    "prompt.chat": "put the checkpoint's chat template around the text",
    "prompt.file": "a file with one prompt, or a JSON list of prompts",
    "prompt.text": "the prompt",
    "prompt.texts": "several prompts, a batch",
    "reference.chained": "follow clean rounding through the whole chain as well",
    "reference.components": "make references of components alone as well",
    "reference.dtypes": "candidates' types that get a noise floor; empty: the run's, and bfloat16",
    "reference.make": "compute the golden one precision wider, for the noise floor",
    "tolerance.calibration": "a job=calibrate run whose limits hold; auto: the newest; null: none",
    "tracking.experiment": "the MLflow experiment that holds the runs",
    "tracking.folder": "where runs are kept (server: where they wait and are cached)",
    "tracking.timeout_s": "seconds that a server may take for an answer",
    "tracking.uri": "address of the tracking server",
}
_ITSELF = (".name", "scope.kind", "device_map.strategy")
_OWN_PORT = "port._target_"


def dotted_keys() -> dict[str, str]:
    """Return ``key=default`` and its gloss, by the way of writing it, in alphabetical order."""
    found: dict[str, dict[str, str]] = {}
    for key, owner, default in _every():
        # What an option calls itself is chosen by the group; a port's name is a choice of its own.
        if key in GLOSSES or not key.endswith(_ITSELF):
            found.setdefault(key, {})[owner] = default
    found[_OWN_PORT] = {"": "..."}
    return {f"{key}={_default(held)}": _gloss(key, held) for key, held in sorted(found.items())}


def _every() -> Iterator[tuple[str, str, str]]:
    """Yield every dotted key, the option it belongs to (empty: always there), and its default."""
    for key, default in _walk(Config, ""):
        if "." in key:
            yield key, "", default
    for group, package in PLUGIN_GROUPS.items():
        for name in registry.names(package):
            settings = getattr(registry.load(package, name), "Settings", None)
            for key, default in _walk(settings, f"{group}.") if settings else ():
                yield key, name, default


def _walk(schema: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for item in dataclasses.fields(schema):
        factory = item.default_factory
        if factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory):
            yield from _walk(factory, f"{prefix}{item.name}.")
            continue
        value = factory() if factory is not dataclasses.MISSING else item.default
        yield f"{prefix}{item.name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_text(each) for each in value)}]"
    if value is None or value is dataclasses.MISSING or str(value) == "???":
        return "null"
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, float):
        return f"{plain:g}"
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def _default(held: dict[str, str]) -> str:
    values = list(dict.fromkeys(held.values()))
    return values[0] if len(values) == 1 else "|".join(values)


def _gloss(key: str, held: dict[str, str]) -> str:
    owners = [owner for owner in held if owner]
    whose = f"{key.partition('.')[0]}={','.join(owners)}" if owners else ""
    return ": ".join(each for each in (whose, GLOSSES.get(key, "")) if each)
