"""The corpus: many faulty blocks, each with its true place and what would be true of it.

More than a third is of kinds that no rule was written for. Everything is drawn by a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import DECODE, PREFILL, Place

if TYPE_CHECKING:
    from torch import nn

    from judging.mutations.base import Mutation
    from layerparity.mistakes.fault import Fault
    from layerparity.model.skeleton import Skeleton

    Draw = Callable[[Random, nn.Module], Iterator[Mutation]]

# The share of kinds that a rule was written for.
FORESEEN = 0.58
DTYPES = ("float32", "bfloat16")
# What is also true of a known fault than its own cause, by its name.
_ALSO = {
    "router_bias_dropped": ("never_loaded",),
    "bias_frozen_in_graph": ("router_bias_dropped",),
    "qk_norm_averaged": ("weights_altered",),
    "fused_qkv_order": ("weights_altered",),
    "gate_up_swapped": ("weights_altered",),
    "rope_full_instead_of_partial": ("rotary",),
    "rope_scaling_left_out": ("rotary",),
    "position_frozen_in_graph": ("rotary",),
    "attention_bias_dropped": ("never_loaded", "offset"),
    "expert_biases_summed": ("weights_altered",),
}


@dataclass(frozen=True)
class Shape:
    """A small model of the corpus: its architecture, what of its sizes is its own, its input.

    ``rows`` are the numbers of tokens of each sequence. Where it ``decodes``, a candidate runs the
    whole model and some tokens more; elsewhere it runs the faulty block alone.
    """

    family: str
    changes: Mapping[str, Any]
    rows: tuple[int, ...]
    decodes: bool = False

    @property
    def name(self) -> str:
        """The model and its input in a word."""
        sizes = f"{self.changes.get('hidden_size', 96)}x{self.changes['num_hidden_layers']}"
        return f"{self.family}-{sizes}-{'+'.join(map(str, self.rows))}"


def _sizes(
    hidden: int, layers: int, heads: int, keys: int, head: int, **own: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head,
        **own,
    }


_MINIMAX = {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}
SHAPES = (
    Shape("minimax_m2", _sizes(96, 2, 6, 3, 16, rotary_dim=8, **_MINIMAX), (24, 17), decodes=True),
    Shape(
        "minimax_m2",
        _sizes(128, 2, 4, 2, 32, rotary_dim=16, **{**_MINIMAX, "num_local_experts": 16}),
        (48,),
    ),
    Shape("qwen3_moe", _sizes(96, 2, 4, 2, 32, mlp_only_layers=[0]), (20, 13), decodes=True),
    Shape("qwen3_moe", _sizes(64, 2, 6, 3, 16, mlp_only_layers=[], num_experts_per_tok=4), (40,)),
    Shape("llama", _sizes(96, 2, 6, 2, 16), (18, 11), decodes=True),
    Shape("gemma2", _sizes(96, 2, 4, 2, 32), (30, 22)),
    Shape("gpt_oss", _sizes(96, 2, 4, 2, 32, sliding_window=8), (24, 15), decodes=True),
    Shape("gpt_oss", _sizes(64, 2, 6, 3, 16, num_experts_per_tok=3), (44,)),
    Shape("deepseek_v3", {"num_hidden_layers": 2}, (36,)),
    Shape("olmo2", _sizes(96, 2, 6, 3, 16), (26, 14)),
)


@dataclass(frozen=True)
class Case:
    """One faulty candidate: the block it is planted in, its fault, and what is true of it.

    ``true`` are the rules whose sentence would be true, ``kind`` the generator that it was drawn
    from, ``foreseen`` whether a rule was written for that. Where it is not ``told``, the port says
    nothing of its weights.
    """

    shape: Shape
    dtype: str
    layer: int
    kind: str
    foreseen: bool
    fault: Fault
    true: frozenset[str]
    told: bool
    seed: int

    @property
    def name(self) -> str:
        """The case in a few words: fault, layer, model and type."""
        told = "" if self.told else ", weights untold"
        return f"{self.fault.id} at layer {self.layer} of {self.shape.name} {self.dtype}{told}"


@dataclass
class Corpus:
    """Draws cases by a seed, for models without weights."""

    seed: int = 0
    _skeletons: dict[str, Skeleton] = field(default_factory=dict)
    _pools: dict[tuple[str, int, str], list[tuple[Fault, frozenset[str]]]] = field(
        default_factory=dict
    )

    def cases(self, count: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[Case]:
        """Yield ``count`` cases, shapes and types in turn; a longer list begins like a shorter."""
        drawn: set[str] = set()
        index = 0
        while len(drawn) < count:
            shape = shapes[index % len(shapes)]
            dtype = DTYPES[index // len(shapes) % len(DTYPES)]
            case = self._case(_draw(self.seed, index), shape, dtype, index)
            index += 1
            if case is not None and case.name not in drawn:
                drawn.add(case.name)
                yield case

    def _case(self, draw: Random, shape: Shape, dtype: str, seed: int) -> Case | None:
        """Return a case that changes something in its block, or None where its kind has none."""
        import torch

        layer = draw.randrange(int(shape.changes["num_hidden_layers"]))
        foreseen = draw.random() < FORESEEN
        kind = draw.choice(sorted(_foreseen() if foreseen else _strange()))
        told = draw.random() < 0.5
        block = self._skeleton(shape).module(str(Place(layer)))
        phases = (PREFILL, DECODE) if shape.decodes else (PREFILL,)
        pool = self._pool(shape, layer, kind, block)
        draw.shuffle(pool)
        for fault, true in pool:
            reasons = [fault.why_not(block, getattr(torch, dtype), phase) for phase in phases]
            if "" in reasons:
                return Case(shape, dtype, layer, kind, foreseen, fault, true, told, seed)
        return None

    def _skeleton(self, shape: Shape) -> Skeleton:
        """Return a shape's model without weights, made once."""
        import torch

        from layerparity.model.skeleton import Skeleton
        from layerparity.selftest.models import small_config

        if shape.name not in self._skeletons:
            config = small_config(shape.family, shape.changes)
            self._skeletons[shape.name] = Skeleton(config, torch.float32, "eager", "eager")
        return self._skeletons[shape.name]

    def _pool(
        self, shape: Shape, layer: int, kind: str, block: nn.Module
    ) -> list[tuple[Fault, frozenset[str]]]:
        """Return all faults of a kind that a block of a shape may have, with what is true."""
        key = shape.name, layer, kind
        if key not in self._pools:
            make = {**_foreseen(), **_strange()}[kind]
            draw = _draw(self.seed, key)
            self._pools[key] = [(each, frozenset(each.true)) for each in make(draw, block)]
        return list(self._pools[key])


def _draw(seed: int, what: object) -> Random:
    return Random(f"{seed} {what}")


def _foreseen() -> dict[str, Draw]:
    """Return what draws faults that a rule was written for, by its name."""
    from judging.mutations import (
        constants,
        cores,
        modules,
        outputs,
        routing,
        shifts,
        stored,
        weights,
    )

    return {
        "catalogue": _catalogue,
        # Near misses, and what was written for them once, count as one kind each.
        "catalogue again": _catalogue,
        "constants": constants.constants,
        "cores": cores.foreseen_cores,
        "outputs": outputs.named_outputs,
        "precision": modules.precision,
        "routing": routing.foreseen_routing,
        "scales": weights.scales,
        "shifts": shifts.shifts,
        "slips": weights.slips,
        "stored": stored.foreseen_stored,
        "swaps": weights.swaps,
    }


def _strange() -> dict[str, Draw]:
    """Return what draws faults that no rule was written for, by its name."""
    from judging.mutations import (
        arithmetic,
        cores,
        outputs,
        routing,
        shifts,
        stored,
    )

    return {
        "strange cores": cores.strange_cores,
        "strange masks": shifts.masks,
        "strange norms": arithmetic.strange_norms,
        "strange outputs": outputs.strange_outputs,
        "more strange outputs": outputs.strange_outputs,
        "strange routing": routing.strange_routing,
        "strange stored": stored.strange_stored,
        "strange sums": arithmetic.strange_sums,
    }


def _catalogue(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield the known faults of blocks, except those of a checkpoint in FP8."""
    from dataclasses import fields

    from judging.mutations.base import Mutation
    from layerparity.mistakes.catalogue import catalogue, known_fault
    from layerparity.mistakes.fault import BLOCK, Fault

    for name in catalogue():
        fault = known_fault(name)
        if not fault.quantised and fault.stage == BLOCK:
            same = {each.name: getattr(fault, each.name) for each in fields(Fault)}
            true = (fault.cause, *_ALSO.get(name, ()))
            yield Mutation(**same, kind="known", size=1.0, true=true)
