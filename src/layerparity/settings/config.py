"""The root of a run's configuration: every key of a command, with its type and default.

Groups (``backend``, ``scope``, ...) are typed beside the code that reads them; each plug-in's
``Settings`` is found by `register`, so adding a plug-in adds its schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from layerparity.ground import registry
from layerparity.settings.tracking import TrackingConfig

PLUGIN_GROUPS = {
    "backend": "run.backends",
    "inputs": "run.inputs",
    "job": "jobs",
    "port": "run.ports",
    "tolerance": "judge.tolerances",
}


class DType(Enum):
    """Floating type a run computes in; torch's names."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class RunKind(Enum):
    """Whether a run is believed or judged; auto: gpu makes a golden, neuron a candidate."""

    auto = "auto"
    golden = "golden"
    candidate = "candidate"


class What(Enum):
    """What job=compare compares: stored runs, or a port's weights with the checkpoint's."""

    runs = "runs"
    weights = "weights"


class FeedMode(Enum):
    """isolated: each block is fed the golden's input to it; chained: the block before it."""

    auto = "auto"
    isolated = "isolated"
    chained = "chained"


class ScopeKind(Enum):
    """How much of the model a run covers."""

    single = "single"
    range = "range"
    full = "full"


@dataclass
class ScopeSettings:
    """conf/scope: which blocks run."""

    kind: ScopeKind = MISSING


@dataclass
class DeviceMapSettings:
    """conf/device_map: accelerate's placement strategy, and the device for ``cuda:N``."""

    strategy: str = MISSING


@dataclass
class ModelSettings:
    """conf/model: a Hugging Face folder, or an architecture without weights.

    ``path`` may be relative to the current directory; ``shipped`` names a checkpoint that comes
    with layerparity; ``architecture`` holds config.json's values where there is no folder;
    ``prompt`` is what the model is asked where the command gives no prompt.
    """

    name: str = MISSING
    path: str | None = None
    shipped: str | None = None
    architecture: dict[str, Any] | None = None
    prompt: str | None = None


@dataclass
class CaptureSettings:
    """conf/capture: which sites are stored; shell patterns over a site's local address."""

    name: str = MISSING
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)


@dataclass
class PromptSettings:
    """What the model is asked. ``file`` holds one prompt, or a JSON list of prompts."""

    text: str | None = None
    file: str | None = None
    texts: list[str] = field(default_factory=list)
    chat: bool = False


@dataclass
class GenerateSettings:
    """Greedy generation after the prefill, on full scope."""

    max_new_tokens: int = 0


@dataclass
class ReferenceSettings:
    """What a golden run computes beside itself, so that a candidate can be told from noise.

    ``dtypes`` are the candidates' floating types that get a noise floor; empty: the run's own, and
    bfloat16. ``chained`` follows rounding through the whole chain as well as block by block;
    ``components`` serves candidates that run one component alone.
    """

    make: bool = True
    dtypes: list[DType] = field(default_factory=list)
    chained: bool = True
    components: bool = True


@dataclass
class AuditSettings:
    """job=audit. ``deep`` reads every weight as well: NaN, all-zero, constant, out of family."""

    deep: bool = False


@dataclass
class PlanSettings:
    """job=plan. ``devices`` are pretended, such as ``8x80GB``; None plans for this machine."""

    devices: str | None = None


@dataclass
class Config:
    """Every key of a command."""

    job: Any = MISSING
    backend: Any = MISSING
    scope: ScopeSettings = field(default_factory=ScopeSettings)
    device_map: DeviceMapSettings = field(default_factory=DeviceMapSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    inputs: Any = MISSING
    port: Any = MISSING
    capture: CaptureSettings = field(default_factory=CaptureSettings)
    tolerance: Any = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    layer: int | None = None
    start: int | None = None
    end: int | None = None
    component: str | None = None
    tp_degree: int = 1
    seq_len: int | None = None
    dtype: DType = DType.float32
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    max_memory: str | None = None
    offload_folder: str | None = None
    threads: int | None = None
    kind: RunKind = RunKind.auto
    feed: FeedMode = FeedMode.auto
    golden: str | None = None
    candidate: str | None = None
    what: What = What.runs
    run: str | None = None
    to: str | None = None
    name: str | None = None
    reuse: bool = False


def register() -> None:
    """Store every schema with Hydra: the root, and each plug-in's ``Settings``."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, package in PLUGIN_GROUPS.items():
        for name in registry.names(package):
            settings = getattr(registry.load(package, name), "Settings", None)
            if settings is not None:
                store.store(group=f"schema/{group}", name=name, node=settings)


def every_key() -> list[str]:
    """Return every key a command may set, nested ones with their dots."""
    found = set(_walk(Config, ""))
    for group, package in PLUGIN_GROUPS.items():
        for name in registry.names(package):
            settings = getattr(registry.load(package, name), "Settings", None)
            found.update(_walk(settings, f"{group}.") if settings else ())
    return sorted(found)


def _walk(schema: Any, prefix: str) -> Iterable[str]:
    for item in dataclasses.fields(schema):
        name = f"{prefix}{item.name}"
        yield name
        factory = item.default_factory
        if factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory):
            yield from _walk(factory, f"{name}.")
