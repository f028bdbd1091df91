"""The root of a run's configuration: every key of a command, with its type, default and help.

What plug-ins take (``backend``, ``inputs``, ...) is typed beside the code that reads it:
`plugin_schemas` finds each plug-in's ``Settings``, so adding a plug-in adds its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import gcd
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.settings.key import check_numbers, key, keys_of
from layerparity.settings.model import ModelSettings
from layerparity.settings.tracking import TrackingConfig

# The key by which an option of a group says what it is called; in all others that is ``name``.
NAMED_BY = {"scope": "kind", "device_map": "strategy"}
PLUGIN_GROUPS = {
    "backend": "backends.known",
    "inputs": "making.inputs",
    "job": "jobs",
    "port": "ports.known",
    "tolerance": "judge.tolerances",
}


# Jobs that leave a run.
_OF_A_RUN = ("run", "bisect", "capture", "invariance")
# The run of a kind that is newest, as golden= and candidate= name it.
LATEST = "latest"
# Each costs stack and a place with the scheduler: with more, some torch operations never end.
MOST_THREADS = 1024
# No model has such a context; a batch of more fits no memory.
MOST_TOKENS = 2**24


class Choice(Enum):
    """One of some words; as text it is the word, where another key repeats it, too."""

    def __str__(self) -> str:
        return str(self.value)


class DType(Choice):
    """Floating type a run computes in; torch's names, and the short ones that people type.

    auto is the checkpoint's own, until the checkpoint is known.
    """

    float64 = fp64 = "float64"
    float32 = fp32 = "float32"
    bfloat16 = bf16 = "bfloat16"
    float16 = fp16 = "float16"
    auto = "auto"


class Rounded(Choice):
    """What products may round their operands to, in a wider floating type."""

    bfloat16 = bf16 = "bfloat16"
    float16 = fp16 = "float16"
    tf32 = "tf32"
    q8_0 = "q8_0"
    q8_k = "q8_k"
    attention_float16 = "attention_float16"
    flash_float16 = "flash_float16"
    cache_float8_e4m3 = "cache_float8_e4m3"
    cache_float8_e5m2 = "cache_float8_e5m2"
    activations = "activations"


class RunKind(Choice):
    """Whether a run is believed or judged; auto: gpu makes a golden, neuron a candidate."""

    auto = "auto"
    golden = "golden"
    candidate = "candidate"


class What(Choice):
    """What job=compare compares: stored runs, or a port's weights with the checkpoint's."""

    runs = "runs"
    weights = "weights"


class FeedMode(Choice):
    """isolated: each block is fed the golden's input to it; chained: the block before it."""

    auto = "auto"
    isolated = "isolated"
    chained = "chained"


class ScopeKind(Choice):
    """How much of the model a run covers."""

    single = "single"
    range = "range"
    full = "full"


# Jobs that can say what they would do.
DRY = ("run", "compare")


@dataclass
class ScopeSettings:
    """conf/scope: which blocks run."""

    kind: ScopeKind = MISSING


@dataclass
class DeviceMapSettings:
    """conf/device_map: accelerate's placement strategy, and the device for ``cuda:N``."""

    strategy: str = MISSING


@dataclass
class CaptureSettings:
    """conf/capture: which sites are stored; shell patterns over a site's local address."""

    name: str = MISSING
    include: list[str] = key([], "shell patterns of sites that are stored")
    exclude: list[str] = key([], "shell patterns of sites that are not stored, such as ['mlp.*']")
    tokens: int | None = key(
        None,
        "how many tokens of long prompts sites are stored of: the first, the last, those where a "
        "window ends, and others between; null: all, or what the golden that feeds the run stored",
        least=16,
    )


@dataclass
class PromptSettings:
    """What the model is asked. ``file`` holds one prompt, or a JSON list of prompts."""

    text: str | None = key(None, "the prompt")
    file: str | None = key(None, "a file with one prompt, or a JSON list of prompts")
    texts: list[str] = key([], "several prompts, a batch")
    chat: bool = key(False, "put the checkpoint's chat template around the text")

    @property
    def given(self) -> list[str]:
        """The keys that give a prompt; none where the default prompt is meant."""
        held = {"text": self.text, "file": self.file, "texts": self.texts or None}
        return [name for name, value in held.items() if value is not None]


@dataclass
class GenerateSettings:
    """Greedy generation after the prefill, on full scope."""

    max_new_tokens: int = key(
        0, "tokens to generate greedily after the prompt; wants scope=full", least=0
    )
    forced: bool = key(False, "decode the golden's tokens, also where blocks are chained")


@dataclass
class ReferenceSettings:
    """What a golden run computes beside itself, so that a candidate can be told from noise.

    ``dtypes`` are the candidates' floating types that get a noise floor; empty: the run's own, and
    bfloat16. ``chained`` follows rounding through the whole chain as well as block by block;
    ``components`` serves candidates that run one component alone.
    """

    make: bool = key(True, "compute the golden one precision wider, for the noise floor")
    dtypes: list[DType] = key(
        [], "candidates' types that get a noise floor; empty: the run's, and bfloat16"
    )
    chained: bool = key(True, "follow clean rounding through the whole chain as well")
    components: bool = key(True, "make references of components alone as well")


@dataclass
class AuditSettings:
    """job=audit. ``deep`` reads every weight as well: NaN, all-zero, constant, out of family."""

    deep: bool = key(
        False,
        "read every weight as well: NaN, all-zero, constant, out of family",
        jobs=(),
    )


@dataclass
class PlanSettings:
    """job=plan. ``devices`` are pretended, such as ``8x80GB``; None plans for this machine.

    ``lnc`` is Neuron's logical NeuronCore configuration: physical cores in a logical one.
    """

    devices: str | None = key(
        None,
        "devices to pretend: 8x80GB, or trn2.48xlarge; null: this machine's",
        jobs=("plan",),
    )
    lnc: int | None = key(
        None,
        "physical cores in a logical one, with trn2.48xlarge: 1 or 2; null: 2",
        jobs=("plan",),
        least=1,
    )


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
    layer: int | None = key(None, "the block of scope=single")
    start: int | None = key(None, "the first block of scope=range")
    end: int | None = key(None, "the last block of scope=range")
    layer_chunks: int | None = key(
        None, "with -m, how many ranges scope=range is cut into, a part each", least=1
    )
    chunk: int | None = key(
        None, "which of the layer_chunks, from 0; null: a sweep's each", least=0
    )
    component: str | None = key(None, "one component alone, or a stage outside the blocks")
    tp_degree: int = key(1, "devices that each block is split over", least=1)
    moe_ep_degree: int = key(
        1, "groups of the tp_degree that each hold a part of the experts", least=1
    )
    seq_len: int | None = key(
        None,
        "cut or pad prompts to so many tokens; random inputs' length",
        least=1,
        most=MOST_TOKENS,
    )
    dtype: DType = key(
        DType.float32,
        "floating type of weights and computation; auto: the model's own",
        jobs=("run",),
    )
    operands: list[Rounded] = key(
        [],
        "what products round their operands to: bfloat16 (auto-cast), tf32, activations (as "
        "config.json says), float16, q8_0, q8_k",
        jobs=("run", "capture"),
    )
    attn_implementation: str | None = key(
        None, "sdpa, eager or another; null: sdpa, or eager where there is none"
    )
    experts_implementation: str | None = key(None, "expert kernel; null: transformers' own choice")
    max_memory: str | None = key(None, "the most that devices may hold: 40GB, or 0:60GB,cpu:100GB")
    offload_folder: str | None = key(None, "where weights that fit no memory are kept")
    threads: int | None = key(None, "threads of torch on the CPU", least=1, most=MOST_THREADS)
    kind: RunKind = key(RunKind.auto, "golden (believed) or candidate (judged); auto: by backend")
    feed: FeedMode = key(FeedMode.auto, "isolated or chained; auto: as the inputs allow")
    golden: str | None = key(
        None,
        "the run that is believed: id, name or folder",
        jobs=("run", "bisect", "capture"),
    )
    candidate: str | None = key(None, "the run that is judged: id, name or folder", jobs=())
    what: What = key(What.runs, "stored runs, or a port's weights", jobs=())
    run: str | None = key(
        None,
        "job=judge: the comparison to judge again; job=export: the run, or all; job=import: the "
        "export",
        jobs=(),
    )
    to: str | None = key(
        None,
        "job=convert: folder to write; job=plan: JSON file to write; job=export: "
        "folder or file.zip to write; job=gate: folder for CI's files",
        jobs=("plan",),
    )
    name: str | None = key(None, "name of the run", jobs=_OF_A_RUN)
    reuse: bool = key(
        False, "take a finished run with the same fingerprint", jobs=("run", "capture")
    )
    resume: bool = key(False, "go on with an interrupted run of the same fingerprint")
    dry_run: bool = key(
        False, "say what would be read, computed and kept, and make nothing", jobs=("run",)
    )

    @property
    def moe_tp_degree(self) -> int:
        """Devices that each expert is split over: tp_degree / moe_ep_degree."""
        return self.tp_degree // self.moe_ep_degree


def checked(composed: Any) -> Config:
    """Return a composed command as its schema, every number held against the bounds of its key.

    Raises UserError for a number out of bounds, OmegaConf's own errors for a misfit.
    """
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config), "the schema of a command is registered"
    config.model.leave_shipped()
    if config.dry_run and config.job.name not in DRY:
        raise UserError(
            f"dry_run=true: job={config.job.name} has none",
            f"leave it out; {' and '.join(f'job={name}' for name in DRY)} have one.",
        )
    check_numbers(config)
    tp, ep = config.tp_degree, config.moe_ep_degree
    emulated = _of_port(config, "emulate_tp")
    if ep > 1 and emulated is not None:
        raise UserError(
            f"moe_ep_degree={ep} is for ranks that are started, and port.emulate_tp={emulated} "
            "computes as ranks do in one process",
            f"use port.emulate_ep={ep}.",
        )
    if tp % ep:
        least = -(-tp // ep) * ep
        raise UserError(
            f"moe_ep_degree={ep} does not divide tp_degree={tp}, and the experts' own degree "
            "is the one over the other",
            f"use moe_ep_degree={gcd(tp, ep)}, or tp_degree={least}.",
        )
    return config


def _of_port(config: Config, name: str) -> Any:
    """Return a key of the port that was chosen, which is a dataclass or a mapping; else None."""
    port = config.port
    return port.get(name) if isinstance(port, Mapping) else getattr(port, name, None)


def register() -> None:
    """Store every schema with Hydra: the root, and each plug-in's ``Settings``."""
    store = ConfigStore.instance()
    for group, name, settings in ((None, "schema", Config), *plugin_schemas()):
        held = store.repo if group is None else store.repo.get("schema", {}).get(group, {})
        # To build one anew takes longer than all else that a command registers.
        if f"{name}.yaml" in held and OmegaConf.get_type(held[f"{name}.yaml"].node) is settings:
            continue
        store.store(group=group and f"schema/{group}", name=name, node=settings)


def plugin_schemas() -> Iterator[tuple[str, str, type]]:
    """Yield (group, name, ``Settings``) of each plug-in that has keys of its own."""
    for group, package in PLUGIN_GROUPS.items():
        for name in registry.names(package):
            settings = getattr(registry.load(package, name), "Settings", None)
            if settings is not None:
                yield group, name, settings


def every_key() -> list[str]:
    """Return every key a command may set, groups among them, nested keys with their dots."""
    keys = {key.path for key in keys_of(Config)}
    for group, _, settings in plugin_schemas():
        keys |= {key.path for key in keys_of(settings, f"{group}.")}
    return sorted({*keys, *(path.partition(".")[0] for path in keys)})
