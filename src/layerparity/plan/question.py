"""Ask whether one model fits one set of devices in one way to run; work out what stages need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import Site
from layerparity.ground import console, registry
from layerparity.ground.errors import UserError
from layerparity.model.resolve import open_checkpoint
from layerparity.plan.devices import Devices, parse_devices, this_machine
from layerparity.plan.weights import PlannedModel, WeightBytes, build, bytes_of
from layerparity.run import open_backend
from layerparity.run.inputs.base import Request
from layerparity.run.inputs.prompt import prompts
from layerparity.run.needs import ITEMSIZE, ForwardPass, cache_bytes, stage_activations
from layerparity.run.scope import num_layers_of, scope_of
from layerparity.settings.config import Config

STREAM = "stream"
# A prompt's tokens are not counted here: that would want the checkpoint's tokenizer.
ASSUMED = 2048
_RANDOM = 32


@dataclass(frozen=True)
class Question:
    """Would it fit? ``new_tokens`` are generated after ``tokens``; every one is cached.

    With ``one_device`` all stages are on one device, or split over ``degree`` of them.
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

    @cached_property
    def sizes(self) -> dict[str, WeightBytes]:
        """Each stage's weights on a device that holds it."""
        weights = self.model.weights
        return {stage: bytes_of(each, self.dtype, self.degree) for stage, each in weights.items()}

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of each stage's weights, parameters and buffers together."""
        return {stage: size.all for stage, size in self.sizes.items()}

    @cached_property
    def cache(self) -> dict[str, int]:
        """Bytes of each stage's keys and values."""
        tokens, item = self.tokens + self.new_tokens, ITEMSIZE[self.dtype]
        sizes, batch = self.model.sizes, self.batch
        return {
            stage: cache_bytes(
                sizes, stage, batch=batch, tokens=tokens, itemsize=item, degree=self.degree
            )
            for stage in self.model.stages
        }

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
    abilities = open_backend.abilities(config)
    devices, values = _devices(config), config.model.architecture
    if config.model.path is not None or values is None:
        checkpoint = open_checkpoint(config.model)
        values = checkpoint.config
        # Of a checkpoint that is not fetched yet there is only config.json.
        if checkpoint.has_weights:
            checkpoint.refuse_other_sizes()
    family = family_of(str(values.get("model_type")))
    scope = scope_of(config, num_layers_of(values), family)
    # What is wrong with the values is said by those who build a model of them.
    experts = config.experts_implementation or abilities.experts
    model = build(values, family, scope.stages, config.attn_implementation, experts)
    batch = batch_of(config, values, scope.stages)
    strategy = config.device_map.strategy
    free = devices.describe() if devices.pretended else f"this machine: {devices.describe()} free"
    way = f"device_map={strategy}"
    if abilities.one_device and strategy != STREAM:
        way = "every stage on one device"
    console.say(
        f"plan of {config.model.name}, {scope.describe()}, {config.dtype.value}, on {free}\n"
        f"{batch.sequences} x {batch.tokens} tokens, {batch.new_tokens} to generate "
        f"({batch.chosen}); {way}"
    )
    return Question(
        model,
        devices,
        strategy,
        config.max_memory,
        config.dtype.value,
        batch.sequences,
        batch.tokens,
        batch.new_tokens,
        abilities.one_device,
        config.tp_degree if abilities.one_device else 1,
    )


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
        rows = registry.load("run.inputs", source).rows_of(config.inputs, request)
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
    if config.plan.devices is not None:
        return parse_devices(config.plan.devices)
    known = open_backend.abilities(config).memory_known
    if not known and (fit := open_backend.affinity(config)).score > 1:
        raise UserError(
            f"A {fit.device} device does not say its memory: give plan.devices=16x96GiB, say."
        )
    return this_machine(known and config.device_map.strategy != "cpu")
