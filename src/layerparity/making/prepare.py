"""Decide everything about a run before a weight is read; what was typed is not changed.

`RunPlan` is what the command and config.json tell, before seconds of imports. `Prepared` is the run
on an opened backend, its inputs chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING

from layerparity.anatomy.block import Block
from layerparity.anatomy.family import Family, family_of
from layerparity.anatomy.shards import Widths
from layerparity.anatomy.site import Site
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.ground import console, registry
from layerparity.ground.errors import UserError
from layerparity.machine.memory import refuse_small_limits
from layerparity.making import needs, part_before, typed_keys
from layerparity.making.inputs import candidate
from layerparity.making.request import goldens, repeated
from layerparity.making.request.inputs import Inputs, Request
from layerparity.making.request.original import open_original
from layerparity.making.request.scope import Scope, num_layers_of, scope_of
from layerparity.model import architecture
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.mechanisms import mechanisms_of
from layerparity.model.packing import settings_of
from layerparity.model.resolve import describe, open_checkpoint, say_parts
from layerparity.model.weight_types import own_type
from layerparity.ports.opening import open_backend, open_port
from layerparity.record.kept_tokens import KeptTokens, chosen_columns
from layerparity.record.manifest import SitePatterns
from layerparity.settings.config import LATEST, Config, DType, FeedMode, RunKind

if TYPE_CHECKING:
    from layerparity.backends.base import Backend
    from layerparity.tracking.store import Store


@dataclass(frozen=True)
class RunPlan:
    """The part of a model that a command asks for.

    ``config`` are the command's keys; in the plan of a run its ``kind`` is not auto. ``original``
    is what the checkpoint was quantised from, where a golden computes with that.
    """

    config: Config
    checkpoint: Checkpoint
    family: Family
    num_layers: int
    scope: Scope
    original: Checkpoint | None = field(default=None, kw_only=True)

    def sites_of(self, stage: str, measured: Block | None = None) -> tuple[Site, ...]:
        """Return the sites that hold what a stage is fed, as far as its block was ``measured``.

        All hold the same values; the likeliest comes first.
        """
        return self.family.input_sites(stage, self.num_layers, measured)


@dataclass(frozen=True)
class Prepared(RunPlan):
    """A run, decided: ``config`` has the feed it will have, as a run stores it."""

    backend: Backend
    inputs: Inputs
    wanted: SitePatterns


def with_kind(config: Config) -> Config:
    """Return the configuration with kind=auto replaced by what its backend makes."""
    if config.kind is not RunKind.auto:
        return config
    return replace(config, kind=open_backend.abilities(config).kind)


def plan_run(config: Config) -> RunPlan:
    """Return what a command asks for. Imports none of torch, transformers, torch_xla and mlflow.

    Raises UserError for limits too small, a scope the model lacks, keys the port does not take.
    """
    refuse_small_limits()
    values = describe(config.model).config
    settings_of(values)
    num_layers = num_layers_of(values)
    family = family_of(str(values.get("model_type")))
    scope = scope_of(config, num_layers, family).with_handers(family, values)
    config = with_own_type(config, values)
    if config.layer_chunks is not None:
        # What is kept of a run is the range that it is: a chunk means nothing by itself.
        config = replace(config, start=scope.start, end=scope.end, layer_chunks=None, chunk=None)
    checkpoint = open_checkpoint(config.model, scope.needed)
    checkpoint.refuse_other_sizes()
    say_parts(checkpoint)
    open_port.check(config, num_layers)
    typed_keys.refuse_unmapped(config)
    refuse_uneven_experts(config, sizes_of(checkpoint.config))
    original = open_original(config, checkpoint, scope.needed) if config.model.original else None
    return RunPlan(config, checkpoint, family, num_layers, scope, original=original)


def with_own_type(config: Config, values: Mapping[str, object]) -> Config:
    """Return the configuration with dtype=auto replaced by what config.json's ``values`` say."""
    own = DType(own_type(values))
    dtypes = [own if each is DType.auto else each for each in config.reference.dtypes]
    reference = replace(config.reference, dtypes=dtypes)
    dtype = own if config.dtype is DType.auto else config.dtype
    return replace(config, dtype=dtype, reference=reference)


def refuse_uneven_experts(config: Config, sizes: ModelSizes) -> None:
    """Refuse groups of ranks that experts, or the width of each, are not divided by. UserError."""
    tp, ep = config.tp_degree, config.moe_ep_degree
    if ep > 1 and not sizes.experts:
        raise UserError(
            f"moe_ep_degree={ep} shares experts by number, and this model has none",
            "use moe_ep_degree=1.",
        )
    widths = Widths(0, sizes.expert_intermediate, sizes.experts)
    misfits = widths.misfits(tp, ep) if ep > 1 else []
    if misfits:
        # Their number comes last, and has to be right first.
        misfit, near = misfits[-1], max(widths.degrees(ep, tp), default=0)
        degrees = f"tp_degree={near} with moe_ep_degree={ep}"
        raise UserError(
            f"{misfit.by}={misfit.part} does not divide {misfit.size} ({misfit.what})",
            f"use {degrees if near else f'moe_ep_degree={gcd(sizes.experts, ep)}'}.",
        )


def prepare(plan: RunPlan, backend: Backend, store: Store) -> Prepared:
    """Choose inputs, feed and capture of a planned run, and say what was chosen.

    Raises UserError where transformers does not know the model, where no input fits, and for a
    typed key that would change nothing.
    """
    config, scope = plan.config, plan.scope
    # A tokenizer would be refused with it, and with less to go by.
    said = plan.checkpoint.config
    architecture.known_type(said.get("model_type"), said.get("architectures"))
    request = Request(
        config=config,
        model_folder=plan.checkpoint.tokenizer_home,
        model=plan.checkpoint.config,
        stages=scope.stages,
        sites_of=plan.sites_of,
        golden=lambda reference: goldens.golden_for(store, reference, plan.checkpoint, request),
        candidate=lambda name: store.find(name or LATEST, kind=RunKind.candidate.value),
        run=store.find,
        refuse_large=lambda *size: needs.refuse_beyond_memory(request, *size),
        chunk=scope.chunk,
    )
    inputs = _inputs(request, plan, store)
    embeds = inputs.source in ("prompt", "tokens") or candidate.TOKENS in inputs.given
    if embeds and scope.stages[0] == "layers.0":
        scope = scope.with_embedding()
    typed_keys.refuse_unused(backend, inputs)
    repeated.refuse_unfed(config, inputs)
    if config.feed is FeedMode.isolated and inputs.feed is not FeedMode.isolated:
        raise UserError(
            "feed=isolated wants the block inputs of a golden run: use inputs=golden, "
            "or feed=chained."
        )
    config = replace(config, feed=inputs.feed)
    if config.feed is not FeedMode.isolated:
        scope.refuse_gaps()
    capture = config.capture
    if capture.tokens is not None:
        inputs.kept = _kept(plan, inputs, capture.tokens)
    wanted = SitePatterns(capture.name, tuple(capture.include), tuple(capture.exclude))
    if inputs.capture is not None and inputs.capture.include:
        # Every value that is replaced is one that is seen.
        wanted = inputs.capture
    console.say(
        f"{config.kind.value} run of {config.model.label}, {scope.describe()}, on "
        f"{backend.name} ({backend.device_label}), {config.dtype.value}, capture={wanted.name}\n"
        f"fed {inputs.chosen}; feed={config.feed.value}"
    )
    if inputs.kept:
        count = f"{len(inputs.kept.columns)} of {inputs.kept.width} tokens"
        console.say(f"sites are stored of {count}; what a stage is fed, of all")
    decided = {**vars(plan), "config": config, "scope": scope}
    return Prepared(**decided, backend=backend, inputs=inputs, wanted=wanted)


def _inputs(request: Request, plan: RunPlan, store: Store) -> Inputs:
    if not part_before.goes_on(request):
        settings = request.config.inputs
        inputs: Inputs = registry.load("making.inputs", settings.name).prepare(settings, request)
        return inputs
    if plan.scope.takes:
        raise UserError(
            f"{request.stages[0]} takes what blocks of other parts hand on beside their state",
            "make the golden as one: scope=full.",
        )
    return part_before.prepare(request, store, plan.checkpoint)


def _kept(plan: RunPlan, inputs: Inputs, count: int) -> KeptTokens:
    """Return the tokens that sites are stored of: so many.

    Raises UserError where the golden that feeds the run stored others.
    """
    real = inputs.attention_mask.bool().tolist()
    lengths = sorted({each.tokens for each in mechanisms_of(plan.checkpoint.config)})
    own = chosen_columns(real, count, lengths)
    if inputs.source in ("golden", "candidate") and own != inputs.kept:
        stored = len(inputs.kept.columns) or "all"
        raise UserError(
            f"the golden that feeds this run stored {stored} tokens of its sites, and "
            f"capture.tokens={count} would store others",
            "leave it out: the golden's are stored.",
        )
    return own
