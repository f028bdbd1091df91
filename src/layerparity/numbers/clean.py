"""Clean ways to compute one stage: they differ from each other by rounding alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerparity.anatomy.computed import Computed
from layerparity.numbers.activations import Activations
from layerparity.numbers.arithmetic import (
    Linear,
    Product,
    Widen,
    accumulated,
    backwards,
    pairwise,
    sharded,
    shuffled,
    strided,
)
from layerparity.numbers.operands import Operands
from layerparity.numbers.rows_apart import Apart

_ATTENTION, _EXPERTS = "_attn_implementation", "_experts_implementation"


@contextmanager
def implementations(config: Any, attention: str | None, experts: str | None) -> Iterator[None]:
    """Let a transformers configuration name other implementations; None leaves one as it is."""
    wanted = {_ATTENTION: attention, _EXPERTS: experts}
    before = {name: getattr(config, name, None) for name in wanted}
    for name, value in wanted.items():
        if value is not None:
            setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def perturbed(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return ``values`` (floating, any shape) with noise of half a unit in the last place (RMS).

    A quarter of the elements move to a neighbouring number, up or down: seeded, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    # One in eight goes up and one in eight down: the root of a quarter is half a unit.
    dice = torch.randint(0, 8, values.shape, generator=generator).to(values.device)
    infinity = torch.full_like(values, torch.inf)
    up, down = torch.nextafter(values, infinity), torch.nextafter(values, -infinity)
    return torch.where(dice == 0, up, torch.where(dice == 1, down, values))


@dataclass(frozen=True)
class Way:
    """One clean computation: implementations, order of sums, input noise, or a wider type.

    None leaves what the run itself uses. ``by_row`` is the product of rows that are apart, where
    it is not the ``product`` itself. ``ranks`` are those of tensor parallelism that a port emulates
    which computes this way: what they share is the model's to say. ``operands`` are what products
    round their operands to, a name of `operands.ROUNDED`.
    """

    name: str
    attention: str | None = None
    experts: str | None = None
    product: Product | None = None
    perturbs: bool = False
    wide: torch.dtype | None = None
    by_row: Product | None = None
    ranks: int | None = None
    operands: str = ""

    @contextmanager
    def around(
        self, config: Any, apart: bool = False, inputs: Mapping[int, Activations] | None = None
    ) -> Iterator[None]:
        """Compute this way inside; ``config`` is the model's transformers configuration.

        Rows are computed ``apart`` where each is a decode step of its own. ``inputs`` are the
        `Operands`'.
        """
        product = (self.by_row if apart else None) or self.product
        # The context that is entered last answers first: `Apart` sees what a product calls in turn.
        with ExitStack() as stack:
            if apart:
                stack.enter_context(Apart())
            stack.enter_context(implementations(config, self.attention, self.experts))
            if product is not None:
                stack.enter_context(Linear(product))
            if self.operands:
                stack.enter_context(Operands(self.operands, inputs))
            if self.wide is not None:
                stack.enter_context(Widen(self.wide))
            yield


# What makes a noise floor: each adds its terms elsewhere, or sees the last machine's rounding.
FLOOR = (
    Way("eager", attention="eager", experts="eager"),
    Way("perturbed", perturbs=True),
    Way(
        "32 strided shards",
        attention="eager",
        experts="eager",
        product=strided(32),
        by_row=strided(32, by_row=True),
    ),
)
# What the run itself does, for a type that the run does not compute in.
PLAIN = Way("plain")
# Others, which no floor is made from: whether they pass is a test of the floors.
OTHERS = (
    Way("8 shards", product=sharded(8), experts="eager"),
    Way("16 shards", product=sharded(16), experts="eager"),
    Way("64 shards", attention="eager", product=sharded(64), experts="eager"),
    Way("tree of 16", product=pairwise(16), experts="eager"),
    Way("shuffled", product=shuffled, experts="eager"),
    Way("backwards", product=backwards, experts="eager"),
    Way("wide accumulation", product=accumulated, experts="eager"),
    Way("batched experts", experts="batched_mm"),
    Way("eager attention", attention="eager"),
    Way("tp 2", ranks=2),
    Way("tp 8", ranks=8),
    Way("tp 64", ranks=64),
)


def ways_of(computed: Computed, own: str) -> tuple[Way, ...]:
    """Return what makes a floor of what a candidate computes in, of a golden in the type ``own``.

    Products of rounded operands are ways beside the others: each is off by its own rounding.
    """
    plain = () if computed.dtype == own else (PLAIN,)
    return (*plain, *FLOOR, *map(rounding, computed.operands))


def rounding(operands: str) -> Way:
    """Return the computation whose products round their operands, by a name of `ROUNDED`."""
    return Way(f"{operands} operands", attention="eager", experts="eager", operands=operands)


def reference(dtype: torch.dtype) -> Way:
    """Return the computation that is one precision wider than ``dtype``."""
    return Way("reference", attention="eager", experts="eager", wide=wider(dtype))


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for the 16-bit types, else float64."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
