"""Prove that a chain of stages computes what the model's own forward computes.

Models differ in what they do between their modules. Instead of a list of those that scale there, a
small twin of the model is run whole and stage by stage, and every boundary is compared.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from layerparity.anatomy.family import COMPONENTS, Family
from layerparity.anatomy.site import EMBEDDING, Place
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.model.arguments import block_arguments, taken
from layerparity.model.layer_classes import classes_of
from layerparity.model.skeleton import Skeleton
from layerparity.model.twin import is_small, twins
from layerparity.ports.observed.dataflow import Anatomised, measure
from layerparity.ports.observed.handed import (
    HANDED,
    Handing,
    Sources,
    for_block,
    needed,
    take_out,
)
from layerparity.ports.observed.observe import ObservedStage

# Relative L2 error of float32 sums in another order stays far below; a forgotten factor does not.
AGREES = 1e-4
# Where a decoder may have more modules: learned positions, a projection before the head.
_WITH_MORE = (("embed_tokens", "layers"), ("norm", "lm_head"))
_OWN_PORT = "give port._target_= a port of your own"
# What blocks hand to later ones beside their state: chosen tokens (GLM-5.2), keys and values, or an
# embedding for each layer (Gemma 4), routers' states, what the first block was given.
_FROM_ELSEWHERE = re.compile(
    r"(prev_|shared_|per_layer_|ple_|original_|transformer_|context_)\w+|input_ids|block_states"
)
# What a stage is passed beside what it is fed.
Named = dict[str, Any]
_proved: dict[str, Proof] = {}


@dataclass
class Proof:
    """What a model's twin showed.

    ``alone`` are the kinds of stage (``layers``, ``layers.mlp``) that compute something else when
    they are run by themselves, ``apart`` those components that give two batches in one call what
    they give each; ``between`` pairs neighbours with something between them;
    ``unproved`` says why nothing could be shown, ``failed`` why stages cannot be run at all.
    ``beside`` are the decoder's modules with weights that are of no stage: learned positions;
    ``passed`` is what blocks take of others beside their state; ``handed`` says which of it they
    cannot do without, and who makes it.
    ``kinds`` holds what was measured of one block of each class of layers; ``unmeasured`` says why
    a class is not among them.
    """

    alone: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    between: set[tuple[str, str]] = field(default_factory=set)
    unproved: str = ""
    failed: str = ""
    kinds: dict[str, Anatomised] = field(default_factory=dict)
    unmeasured: str = ""
    beside: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    handed: Sources = field(default_factory=Sources)


@dataclass
class Forward:
    """One forward of the whole model: what went into each stage and came out, and the logits.

    Floating [batch, token, channel], ids int64 [batch, token] into the embedding; logits floating
    [batch, token, vocabulary].
    """

    given: dict[str, torch.Tensor]
    output: dict[str, torch.Tensor]
    logits: torch.Tensor


def check(proof: Proof, model: str, stages: Sequence[str], chained: bool) -> list[str]:
    """Refuse stages whose run would not be the model's; say what could not be shown.

    ``model`` is its type by name; ``chained`` says whether each stage is fed the one before it.
    Raises UserError.
    """
    if proof.failed:
        others = f"; its {', '.join(proof.beside)} belong to no stage" if proof.beside else ""
        passed = " and ".join(proof.passed)
        why = f": its blocks take {passed} from elsewhere in the model" if passed else ""
        raise UserError(
            f"{model} cannot be run by stages{why} ({proof.failed}{others}): {_OWN_PORT}."
        )
    kinds = [kind_of(stage) for stage in stages]
    for kind in kinds:
        if kind in proof.alone:
            raise UserError(
                f"{model}: {kind} computes something else by itself than in the model: leave it "
                f"out of the scope, or {_OWN_PORT}."
            )
    pairs = [*pairwise(kinds)] if chained else []
    for pair in [*pairs, *([("lm_head", "logits")] if "lm_head" in kinds else [])]:
        if pair in proof.between:
            raise UserError(
                f"{model} computes something between {pair[0]} and {pair[1]} that belongs to "
                f"{_nobody(proof, pair)}, so these stages would be wrong: use scope=single "
                f"layer=N inputs=random, or {_OWN_PORT}."
            )
    notes = []
    if proof.unproved:
        notes.append(
            f"That the stages of {model} make up the model is not proved ({proof.unproved}): "
            "compare the logits of a full run with transformers' own once."
        )
    if proof.unproved or proof.unmeasured:
        notes.append(
            f"What the blocks of {model} compute from what was not measured "
            f"({proof.unproved or proof.unmeasured}): a comparison names a wrong module inside "
            "them by what its family declares, or by the usual order alone."
        )
    return notes


def _nobody(proof: Proof, pair: tuple[str, str]) -> str:
    """Return what holds nothing of what a model computes between two stages."""
    known = pair in _WITH_MORE and proof.beside
    return f"no stage (its {', '.join(proof.beside)})" if known else "no module"


def prove(skeleton: Skeleton, family: Family) -> Proof:
    """Return what the twin shows, from memory where this architecture was proved before."""
    config = skeleton.config
    asked = [config._attn_implementation, getattr(config, "_experts_implementation", None)]
    key = text_digest(json.dumps([config.to_dict(), asked], sort_keys=True, default=str))
    if key not in _proved:
        _proved[key] = _prove(skeleton, family)
    return _proved[key]


def _prove(skeleton: Skeleton, family: Family) -> Proof:
    reason, failed = "no small model of the kind can be built", ""
    beside: tuple[str, ...] = ()
    for twin in twins(skeleton):
        seeded = torch.Generator().manual_seed(0)
        ids = torch.randint(1, int(twin.config.vocab_size), (2, 8), generator=seeded)
        # The second row is padded on the left.
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        try:
            whole = _forward(twin, ids, mask)
        except Exception as error:
            # transformers' own code on an architecture of the user's: it may fail in any way.
            reason = _first_line(error)
            continue
        if not bool(whole.logits[mask.bool()].isfinite().all()):
            reason = "a small model of the kind gives no finite logits"
            continue
        try:
            return _compare(twin, family, whole, mask)
        except Exception as error:
            failed, beside = _first_line(error), _beside(twin)
    # Where the twin has the sizes of the model itself, the model cannot be computed either.
    failed = failed or (reason if is_small(skeleton) else "")
    return Proof(unproved=reason, failed=failed, beside=beside, passed=_passed(skeleton))


def _passed(skeleton: Skeleton) -> tuple[str, ...]:
    """Return what a block's forward takes of other blocks, or of the model, beside its state."""
    taken = inspect.signature(skeleton.blocks[0].forward).parameters
    return tuple(name for name in taken if _FROM_ELSEWHERE.match(name))


def _beside(twin: Skeleton) -> tuple[str, ...]:
    """Return the decoder's modules with weights that are of no stage."""
    several = twin.embedding
    embedding = [twin.module(EMBEDDING)] if several is None else several.modules_in_order
    stages = {*embedding, twin.blocks, twin.module("norm"), twin.module("lm_head")}
    others = (each for each in twin.base.named_children() if each[1] not in stages)
    return tuple(name for name, each in others if any(True for _ in each.parameters()))


def _compare(twin: Skeleton, family: Family, whole: Forward, mask: torch.Tensor) -> Proof:
    """Run each stage by itself on what the whole model fed it, and compare what comes out."""
    proof = Proof()
    arguments = block_arguments(twin, mask, _positions(mask))
    order = _stages(twin)
    follows = dict(zip(order, [*order[1:], "logits"], strict=True))
    wanted = {**whole.given, "logits": whole.logits}
    mixing: set[str] = set()
    classes = classes_of(twin)
    handed: dict[str, torch.Tensor] = {}
    for stage, given in whole.given.items():
        place = Place.parse(stage)
        inside = "" if place.layer is None else place.module
        named = _named(twin, place, arguments, handed, mask)
        try:
            plain, seen = ObservedStage(twin.module(stage), [])(given, named)
        except Exception:
            if not inside:
                raise
            # A component that is passed more than one value by its block: Bloom's MLP adds.
            proof.alone.add(kind_of(stage))
            continue
        if place.layer is not None and not inside:
            needs = _needed(twin.module(stage), given, named)
            proof.handed.note(classes[place.layer], needs, seen)
            # The block itself is measured with what it takes.
            arguments[place.layer] |= Handing(twin.module(stage), named[HANDED]).arguments
        if not inside:
            handed |= take_out(seen)
        if inside and inside != "self_attn":
            kinds = proof.apart if _is_apart(twin.module(stage), given, plain) else mixing
            kinds.add(kind_of(stage))
        # Of several modules that are no module of the model's, the next stage's input tells.
        if stage in whole.output and not _agree(plain, whole.output[stage], mask):
            proof.alone.add(kind_of(stage))
        elif stage in follows:
            after = family.after.get(stage)
            passed = plain if after is None else after(plain, twin.config)
            if not _agree(passed, wanted[follows[stage]], mask):
                proof.between.add((kind_of(stage), kind_of(follows[stage])))
    proof.apart -= mixing
    proof.beside = _beside(twin)
    _measure_kinds(proof, twin, family, whole, arguments)
    return proof


def _named(
    twin: Skeleton,
    place: Place,
    arguments: Sequence[Named],
    handed: dict[str, torch.Tensor],
    mask: torch.Tensor,
) -> Named:
    """Return what a stage is passed beside what it is fed; ``handed`` is what others handed on."""
    if str(place) == EMBEDDING and twin.embedding is not None:
        return {"position_ids": _positions(mask)}
    if place.layer is None or place.module not in ("", "self_attn"):
        return {}
    return {**arguments[place.layer], HANDED: for_block(handed, place.layer)}


def _needed(module: torch.nn.Module, given: torch.Tensor, named: Named) -> set[str]:
    """Return what a block cannot be run without, of what others handed on, by its `source`."""
    if not taken(module):
        return set()
    stage, handed = ObservedStage(module, []), named[HANDED]
    return set(needed(module, handed, lambda left: stage(given, {**named, HANDED: left})[0]))


def _measure_kinds(
    proof: Proof,
    twin: Skeleton,
    family: Family,
    whole: Forward,
    arguments: Sequence[Named],
) -> None:
    """Measure what one block of each class of layers computes from what."""
    for layer, kind in classes_of(twin).items():
        if kind in proof.kinds:
            continue
        block, given = twin.blocks[layer], whole.given[str(Place(layer))]
        try:
            proof.kinds[kind] = measure(block, given, arguments[layer], family.present(block))
        except Exception as error:
            # An architecture of the user's may not bear what is done to its values.
            proof.unmeasured = _first_line(error)


def _is_apart(module: torch.nn.Module, given: torch.Tensor, plain: torch.Tensor) -> bool:
    """Say whether a module gives two inputs [batch, token, channel] in one call what it gives each.

    ``plain`` is what it gives the first, alone.
    """
    stage, other = ObservedStage(module, []), given.roll(1, 1)
    try:
        both, alone = stage(torch.cat([given, other]), {})[0], stage(other, {})[0]
    except Exception:
        # An architecture of the user's: its module may take one batch alone.
        return False
    everywhere = torch.ones(given.shape[:2])
    first, second = both.chunk(2)
    return _agree(first, plain, everywhere) and _agree(second, alone, everywhere)


def _forward(twin: Skeleton, ids: torch.Tensor, mask: torch.Tensor) -> Forward:
    """Run the model's own forward, and note what passes by at every stage and component."""
    given: dict[str, torch.Tensor] = {}
    output: dict[str, torch.Tensor] = {}

    several = twin.embedding

    def watch(stage: str) -> Any:
        first_only = stage == EMBEDDING and several is not None

        def hook(_: object, args: Any, named: Any, result: Any) -> None:
            first = args[0] if args else next(iter(named.values()))
            given[stage] = first.clone()
            if not first_only:
                output[stage] = (result[0] if isinstance(result, tuple) else result).clone()

        module = several.modules_in_order[0] if several and first_only else twin.module(stage)
        return module.register_forward_hook(hook, with_kwargs=True)

    components = [
        str(Place(number, name))
        for number, block in enumerate(twin.blocks)
        for name, _ in block.named_children()
        if name in COMPONENTS.values()
    ]
    with ExitStack() as stack, torch.no_grad():
        for stage in (*_stages(twin), *components):
            stack.callback(watch(stage).remove)
        logits = twin.model(
            input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=False
        ).logits
    return Forward(given, output, logits)


def _stages(twin: Skeleton) -> list[str]:
    blocks = [str(Place(layer)) for layer in range(len(twin.blocks))]
    return ["embed_tokens", *blocks, "norm", "lm_head"]


def kind_of(stage: str) -> str:
    """Return a stage without its number: ``layers``, ``layers.mlp``, ``norm``."""
    return ".".join(part for part in stage.split(".") if not part.isdigit())


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _agree(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    rows = mask.bool()
    same = ours.shape[:2] == rows.shape
    ours, theirs = (ours[rows], theirs[rows]) if same else (ours, theirs)
    return bool((ours - theirs).norm() <= AGREES * theirs.norm())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
