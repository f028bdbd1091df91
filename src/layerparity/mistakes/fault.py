"""One mistake that a port can make, and what plants it in a loaded stage.

A fault's file is named after it and holds ``FAULT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.site import DECODE, PREFILL, Place
from layerparity.numbers.activations import Activations
from layerparity.numbers.pieces import Pieces

PHASES = (PREFILL, DECODE)
# What most faults are planted in; the others, in one stage outside the blocks.
BLOCK = "block"


@dataclass(frozen=True)
class Pass:
    """One pass as a block's arguments see it.

    ``attention_mask`` is int64 [batch, seen token], 1 for real tokens; ``position_ids`` int64
    [batch, token]; both on the CPU. ``tables`` gives the model's own rotary tables (cos, sin) for
    other position ids of the same shape. ``keys`` counts those that a cache of a fixed size
    has room for, 0 without one. ``before`` is the mask of the last pass of the request before,
    int64 [batch, seen token], None where this is the first.
    """

    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    config: Any
    dtype: torch.dtype
    tables: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    keys: int = 0
    before: torch.Tensor | None = None


# transformers' cache of a block, of whatever kind.
Cached = Any


@dataclass
class RequestState:
    """What is cached of a block for a request that begins, and what was for the one before it.

    ``cached`` is transformers' cache of the block, of fixed size and still empty; ``before`` that
    of the request before, as it ended, and ``neighbour`` that of the block before, each None where
    there is none. ``taking_back()`` returns what makes it again what it is then.
    """

    cached: Cached
    before: Cached
    neighbour: Cached
    taking_back: Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Quantised:
    """A weight that is stored packed: ``value`` is its place in the block, which can be written to.

    ``pieces`` are what each of its matrices is computed from, with rows and columns swapped where
    it lies ``turned``.
    """

    value: torch.Tensor
    pieces: Sequence[Pieces]
    turned: bool

    def put(self, values_of: Callable[[Pieces], torch.Tensor]) -> None:
        """Give each matrix the values [row, column] that are computed from its pieces."""
        with torch.no_grad():
            stack = self.value if self.value.dim() > 2 else self.value[None]
            for place, each in zip(stack, self.pieces, strict=True):
                values = values_of(each._replace(numbers=each.numbers.clone()))
                place.copy_(values.T if self.turned else values)


@dataclass
class Surgery:
    """What a fault is planted with: it remembers how a module was, so that it can be undone.

    Weights are changed in place and come back by loading them again. ``frozen`` holds weights, by
    their path inside the stage and in its shapes, that a compiled graph uses in place of its own.
    ``quantised()`` gives the stage's weights that are stored packed, ``inputs()`` how the inputs of
    some are rounded, as `Operands` takes it. ``layer`` is None outside the
    blocks. ``drawn`` says that what was planted is random, so that nobody else's mistake has the
    same numbers.
    """

    layer: int | None
    config: Any
    seed: int = 0
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    quantised: Callable[[], Iterable[Quantised]] = tuple
    inputs: Callable[[], Mapping[int, Activations]] = dict
    drawn: bool = field(default=False, init=False)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def set(self, owner: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute of a module, such as ``forward`` or ``top_k``."""
        if name in owner.__dict__:
            before = owner.__dict__[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: nn.Module, around: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a module's forward by what ``around`` makes of it."""
        self.set(owner, "forward", around(owner.forward))

    def add(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Give a module a submodule, which travels to the device with it."""
        owner.add_module(name, module)
        self._undo.append(lambda: delattr(owner, name))

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU that depends on the seed and the layer alone."""
        self.drawn = True
        return torch.Generator().manual_seed(1_000_003 * self.seed + (self.layer or 0))

    def undo(self) -> None:
        """Put every changed attribute back, the newest first."""
        while self._undo:
            self._undo.pop()()


WhyNot = Callable[[nn.Module, torch.dtype, str], str]
Plant = Callable[[nn.Module, Surgery], None]
# What a block is passed beside its state, by name.
Arguments = Mapping[str, Any]
NewArguments = dict[str, Any]
ChangeArguments = Callable[[Arguments, Pass], NewArguments]
ChangeState = Callable[[RequestState], None]


def everywhere(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return nothing: no block, type or phase is exempt from the fault."""
    return ""


def nothing(block: nn.Module, surgery: Surgery) -> None:
    """Leave the block alone: the fault is in the block's arguments."""


@dataclass(frozen=True)
class Fault:
    """One mistake: where it stands, what plants it, and what should be said of it."""

    id: str
    story: str
    component: str
    """The first module that it makes wrong, by its path in the block; outside blocks, the stage."""
    cause: str
    """The cause that should be named."""
    by_weights: bool = False
    """The weights alone show it."""
    quantised: tuple[str, ...] = ()
    """It is one of unpacking weights, of these formats."""
    of_inputs: Callable[[Activations], bool] | None = None
    """It is one of packing what weights are multiplied by, where a checkpoint says it of some."""
    coarse: bool = False
    """It rounds to so few bits that a last place before it makes a step of theirs behind it."""
    why_not: WhyNot = everywhere
    """Of a module, a floating type and a phase: why it changes nothing there, or nothing. The
    module, a block or another stage, may be on the meta device."""
    plant: Plant = nothing
    """Plants it in a module whose weights are on the CPU."""
    arguments: ChangeArguments | None = None
    """What a faulty block is passed."""
    state: ChangeState | None = None
    """What becomes of a request's cache when the request begins."""
    keeps: str = ""
    """It is one of blocks whose cache keeps this (`mistakes.requests`); empty: of any."""
    shown_by: tuple[str, ...] = ()
    """A mistake of what is kept between passes: the axes of job=invariance that show it."""
    never_loaded: tuple[str, ...] = ()
    """Weights, by their path in the module, that keep what they were initialised with."""
    stage: str = BLOCK
    """What it is planted in: `BLOCK`, or ``embed_tokens``, ``norm`` or ``lm_head``."""
    says: str = ""
    """The mistake as a sentence says it of one block, where that is not the ``story``."""
    refines: tuple[str, ...] = ()
    """Causes that stored tensors may show of it, and that say less."""
    degree: int = 1
    """A mistake of sharding is one of so many ranks."""
    rank: int | None = None
    """The rank that makes it alone; None where all of them do."""
    refuted_by: str = ""
    """What a single token that has it would refute the mistake by, as a cause says it."""

    @property
    def sentence(self) -> str:
        """What was done wrong, as a cause says it."""
        return self.says or self.story

    def fits_inputs(self, inputs: Iterable[Activations]) -> bool:
        """Say whether it can be made where the inputs of a stage's weights are rounded so."""
        return self.of_inputs is None or any(map(self.of_inputs, inputs))

    def places(self, layers: Iterable[int]) -> list[Place]:
        """Return what it is planted in: the blocks of these layers, or its stage outside them."""
        if self.stage == BLOCK:
            return [Place(layer) for layer in layers]
        return [Place(None, self.stage)]
