"""Ask whether one model fits one set of devices in one way to run; work out what stages need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from layerparity.anatomy.family import Family, family_of
from layerparity.anatomy.site import Site
from layerparity.ground import console, registry
from layerparity.ground.errors import UserError
from layerparity.machine.neuron_machine import instance_here
from layerparity.machine.trainium import smallest_for
from layerparity.making.inputs.prompt import prompts
from layerparity.making.needs import ITEMSIZE, ForwardPass, cache_bytes, stage_activations
from layerparity.making.prepare import refuse_uneven_experts
from layerparity.making.request.inputs import Request
from layerparity.making.request.scope import num_layers_of, scope_of
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.resolve import describe, say_parts
from layerparity.model.weight_types import own_type
from layerparity.plan.core_share import CoreLayout
from layerparity.plan.devices import Devices, cores_of, parse_devices, this_machine
from layerparity.plan.kept import KeptBytes, kept_of
from layerparity.plan.weights import PlannedModel, WeightBytes, build, bytes_of
from layerparity.ports.opening import open_backend, open_port
from layerparity.record.manifest import SitePatterns
from layerparity.settings.config import Config, DType, FeedMode, RunKind

STREAM = "stream"
# A prompt's tokens are not counted here: that would want the checkpoint's tokenizer.
ASSUMED = 2048
_RANDOM = 32


@dataclass(frozen=True)
class Question:
    """Would it fit? ``new_tokens`` are generated after ``tokens``; every one is cached.

    With ``one_device`` all stages are on one device, or split over ``degree`` of them: evenly, or
    with ``nxdi`` as that library lays a model over cores, with ``ep`` groups of them by expert.
    ``gpus`` says that these are GPUs, and no cores of Neuron's. ``kept`` is what the run keeps.
    """

    model: PlannedModel
    devices: Devices
    strategy: str
    max_memory: str | None
    dtype: str
    batch: int
    tokens: int
    new_tokens: int = 0
    one_device: bool = False
    degree: int = 1
    nxdi: bool = False
    ep: int = 1
    gpus: bool = False
    kept: KeptBytes = field(default_factory=KeptBytes)

    @cached_property
    def layout(self) -> CoreLayout:
        """How NxDI lays the model over ``degree`` cores."""
        return CoreLayout(self.model.sizes, self.degree, self.ep)

    @cached_property
    def sizes(self) -> dict[str, WeightBytes]:
        """Each stage's weights on a device that holds it."""
        weights = self.model.weights
        if self.nxdi:
            return {s: self.layout.bytes_of(each, self.dtype) for s, each in weights.items()}
        return {stage: bytes_of(each, self.dtype, self.degree) for stage, each in weights.items()}

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of each stage's weights, parameters and buffers together."""
        return {stage: size.all for stage, size in self.sizes.items()}

    @cached_property
    def cache(self) -> dict[str, int]:
        """Bytes of each stage's keys and values."""
        tokens, item = self.tokens + self.new_tokens, ITEMSIZE[self.dtype]
        degree = 1 if self.nxdi else self.degree
        cached = {
            stage: cache_bytes(
                self.model.sizes,
                stage,
                batch=self.batch,
                tokens=tokens,
                itemsize=item,
                degree=degree,
            )
            for stage in self.model.stages
        }
        if not self.nxdi or self.degree == 1:
            return cached
        return {stage: int(size * self.layout.cache_part()) for stage, size in cached.items()}

    @cached_property
    def activations(self) -> dict[str, int]:
        """Bytes of each stage's activations, an estimate."""
        model = self.model
        work = ForwardPass(
            self.batch, self.tokens, ITEMSIZE[self.dtype], model.attention, model.experts
        )
        return {
            stage: stage_activations(model.sizes, stage, stage in model.sparse, work)
            for stage in model.stages
        }


def question_of(config: Config) -> Question:
    """Return what a command asks, and say it. Raises UserError where it makes no sense."""
    abilities, devices = open_backend.abilities(config), _devices(config)
    # On a machine without Neuron, a command of one core is for the stand-in.
    nxdi = abilities.nxdi and (config.tp_degree > 1 or devices.pretended)
    _refuse_cores(config, devices, nxdi)
    values = _architecture(config)
    dtype = own_type(values) if config.dtype is DType.auto else config.dtype.value
    family = family_of(str(values.get("model_type")))
    scope = scope_of(config, num_layers_of(values), family).with_handers(family, values)
    # What is wrong with the values is said by those who build a model of them.
    experts = config.experts_implementation or abilities.experts
    chained = config.feed is not FeedMode.isolated
    attention = config.attn_implementation
    model = build(values, family, scope.stages, attention, experts, chained=chained)
    batch = batch_of(config, values, scope.stages)
    # Processes of transformers' own plan hold a part of every stage each.
    ranks = config.tp_degree > 1 and abilities.ranks is not None and not abilities.one_device
    one_device = abilities.one_device or nxdi or ranks
    if config.moe_ep_degree > 1 and not nxdi:
        open_port.check(config, num_layers_of(values))
        refuse_uneven_experts(config, model.sizes)
    free = devices.describe() if devices.pretended else f"this machine: {devices.describe()} free"
    if devices.instance is not None and config.plan.devices is None:
        free += " (plan.devices= names another)"
    console.say(
        f"plan of {config.model.label}, {scope.describe()}, {dtype}, on {free}\n"
        f"{batch.sequences} x {batch.tokens} tokens, {batch.new_tokens} to generate "
        f"({batch.chosen}); {_way(config, nxdi, one_device=one_device)}"
    )
    return Question(
        model,
        devices,
        config.device_map.strategy,
        config.max_memory,
        dtype,
        batch.sequences,
        batch.tokens,
        batch.new_tokens,
        one_device,
        config.tp_degree if one_device else 1,
        nxdi,
        config.moe_ep_degree,
        ranks,
        _kept(config, model, family, dtype, batch),
    )


def _kept(
    config: Config, model: PlannedModel, family: Family, dtype: str, batch: Batch
) -> KeptBytes:
    """Return what the run keeps on disk, and what its floors take, if it has any."""
    abilities, capture = open_backend.abilities(config), config.capture
    kind = abilities.kind if config.kind is RunKind.auto else config.kind
    stored = batch.sequences * ((capture.tokens or 0) + batch.new_tokens)
    able = abilities.references and config.tp_degree == 1 and config.reference.make
    return kept_of(
        model,
        family,
        SitePatterns(capture.name, tuple(capture.include), tuple(capture.exclude)),
        dtype,
        batch.sequences * (batch.tokens + batch.new_tokens),
        floors=able and kind is RunKind.golden,
        chained=config.feed is not FeedMode.isolated,
        components=config.reference.components,
        stored=None if capture.tokens is None else stored,
        sequences=batch.sequences,
    )


def _refuse_cores(config: Config, devices: Devices, nxdi: bool) -> None:
    """Raise UserError with the cure where a command wants Neuron cores and its backend has none."""
    if devices.instance is not None and not nxdi:
        raise UserError(
            f"plan.devices={devices.instance.name} is of Neuron cores", "add backend=neuron."
        )


def _architecture(config: Config) -> dict[str, Any]:
    """Return the values of config.json; of a checkpoint that is here, held against its tensors."""
    config.model.refuse_original()
    if config.model.path is None and config.model.architecture is not None:
        if config.model.adapter:
            raise UserError("model.adapter wants a checkpoint", "give model.path=<folder>.")
        return config.model.architecture
    checkpoint = describe(config.model)
    say_parts(checkpoint)
    # Of a checkpoint that is not fetched yet there is only config.json.
    if checkpoint.has_weights:
        checkpoint.refuse_other_sizes()
        console.say(_stored(checkpoint))
    return checkpoint.config


def _stored(checkpoint: Checkpoint) -> str:
    """Return how many bytes the text model's tensors take in the checkpoint, and of which types."""
    kinds = Counter[str]()
    for each in checkpoint.tensors.values():
        kinds[each.dtype] += each.bytes
    total = kinds.total()
    parts = ", ".join(f"{kind} {console.bytes_text(n)}" for kind, n in kinds.most_common())
    return f"stored as {total:,} bytes ({console.bytes_text(total)}): {parts}"


def _way(config: Config, nxdi: bool, *, one_device: bool) -> str:
    """Return how stages are laid over devices, in words."""
    streams = config.device_map.strategy == STREAM
    way = f"device_map={config.device_map.strategy}"
    if one_device and not streams:
        way = "every stage on one device"
    if nxdi and config.tp_degree > 1:
        how = f"laid over {config.tp_degree} cores as NxDI does"
        way = f"{way}, {how}" if streams else how
    elif one_device and config.tp_degree > 1:
        way += f", split evenly over {config.tp_degree}"
    if config.moe_ep_degree > 1 and not nxdi:
        way += f", experts shared by number among {config.moe_ep_degree} groups"
    return way


@dataclass(frozen=True)
class Batch:
    """Sequences, tokens of each, tokens generated after them, and where the numbers are from."""

    sequences: int
    tokens: int
    new_tokens: int
    chosen: str


def batch_of(config: Config, model: Mapping[str, Any], stages: tuple[str, ...]) -> Batch:
    """Return the batch that ``inputs=`` and ``seq_len=`` describe, nothing of a store is read.

    Raises UserError for a file of tokens that cannot be read, and beyond the model's context.
    """
    request = Request(
        config=config,
        model_folder=Path(),
        model=dict(model),
        stages=stages,
        sites_of=lambda stage, measured: [Site(stage, "in")],
        golden=lambda reference: (),
    )
    source, new = config.inputs.name, config.generate.max_new_tokens
    if source == "tokens":
        rows = registry.load("making.inputs", source).rows_of(config.inputs, request)
        chosen = f"tokens of {Path(config.inputs.file).name}"
        return Batch(len(rows), config.seq_len or max(map(len, rows)), new, chosen)
    if source == "random":
        sequences, length = config.inputs.batch, _RANDOM
    else:
        sequences = 1 if source == "golden" else len(prompts(request))
        length = min(ASSUMED, request.max_tokens - new)
    tokens = config.seq_len or length
    if tokens + new > request.max_tokens:
        raise UserError(
            f"{tokens} tokens and {new} to generate are more than the model's context of "
            f"{request.max_tokens}: use seq_len={max(request.max_tokens - new, 1)}."
        )
    assumed = "" if config.seq_len else f", seq_len={tokens} assumed"
    return Batch(sequences, tokens, new, f"inputs={source}{assumed}")


def _devices(config: Config) -> Devices:
    """Return the devices of ``plan.devices``, of this machine, or of the usual Neuron instance."""
    lnc, abilities = config.plan.lnc, open_backend.abilities(config)
    if config.plan.devices is not None:
        return parse_devices(config.plan.devices, lnc)
    known, here = abilities.memory_known, open_backend.affinity(config.backend.name).score > 1
    if abilities.nxdi and here and (instance := instance_here()) is not None:
        return cores_of(instance, lnc)
    if not known and here:
        raise UserError(
            "A Neuron device does not say its memory: give plan.devices=trn2.48xlarge, or what it "
            "is."
        )
    if abilities.nxdi and config.tp_degree > 1:
        usual = smallest_for(config.tp_degree, lnc)
        if usual is None:
            raise UserError(
                f"tp_degree={config.tp_degree} is more than any known Neuron machine has cores",
                "give a smaller one, or plan.devices=1024x24GiB.",
            )
        return cores_of(usual, lnc)
    if lnc is not None:
        raise UserError(
            f"plan.lnc={lnc} is for Neuron cores", "add backend=neuron plan.devices=trn2.48xlarge."
        )
    return this_machine(known and config.device_map.strategy != "cpu")
