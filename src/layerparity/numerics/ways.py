"""Ways: clean computations of one stage, which differ from each other by rounding alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerparity.numerics.implementations import implementations
from layerparity.numerics.sums import (
    Linear,
    Product,
    accumulated,
    backwards,
    pairwise,
    sharded,
    shuffled,
    strided,
)
from layerparity.numerics.widen import Widen


@dataclass(frozen=True)
class Way:
    """One clean computation: implementations, order of sums, input noise, or a wider type.

    None leaves what the run itself uses.
    """

    name: str
    attention: str | None = None
    experts: str | None = None
    product: Product | None = None
    perturbs: bool = False
    wide: torch.dtype | None = None

    @contextmanager
    def around(self, config: Any) -> Iterator[None]:
        """Compute this way inside; ``config`` is the model's transformers configuration."""
        with ExitStack() as stack:
            stack.enter_context(implementations(config, self.attention, self.experts))
            if self.product is not None:
                stack.enter_context(Linear(self.product))
            if self.wide is not None:
                stack.enter_context(Widen(self.wide))
            yield


# What makes a noise floor: each adds its terms elsewhere, or sees the last machine's rounding.
FLOOR = (
    Way("eager", attention="eager", experts="eager"),
    Way("perturbed", perturbs=True),
    Way("32 strided shards", attention="eager", experts="eager", product=strided(32)),
)
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
)


def reference(dtype: torch.dtype) -> Way:
    """Return the computation that is one precision wider than ``dtype``."""
    return Way("reference", attention="eager", experts="eager", wide=wider(dtype))


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for the 16-bit types, else float64."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
