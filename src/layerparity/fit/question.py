"""Question: one model, one set of devices, one way to run; and what each stage then needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from layerparity.fit.activations import Pass, stage_activations
from layerparity.fit.cache import cache_bytes
from layerparity.fit.devices import Devices
from layerparity.fit.model import Model
from layerparity.fit.weights import ITEMSIZE, Size, size_of

STREAM = "stream"


@dataclass(frozen=True)
class Question:
    """Would it fit? ``new_tokens`` are generated after ``tokens``; every one is cached.

    With ``neuron`` all stages are on one device, or split over ``degree`` of them.
    """

    model: Model
    devices: Devices
    strategy: str
    max_memory: str | None
    dtype: str
    batch: int
    tokens: int
    new_tokens: int = 0
    neuron: bool = False
    degree: int = 1

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """Each stage's weights on a device that holds it."""
        held = self.model.weights
        return {stage: size_of(held[stage], self.dtype, self.degree) for stage in held}

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of each stage's weights, parameters and buffers together."""
        return {stage: size.all for stage, size in self.sizes.items()}

    @cached_property
    def cache(self) -> dict[str, int]:
        """Bytes of each stage's keys and values."""
        tokens, item = self.tokens + self.new_tokens, ITEMSIZE[self.dtype]
        shape, batch = self.model.shape, self.batch
        return {
            stage: cache_bytes(
                shape, stage, batch=batch, tokens=tokens, itemsize=item, degree=self.degree
            )
            for stage in self.model.stages
        }

    @cached_property
    def activations(self) -> dict[str, int]:
        """Bytes of each stage's activations, an estimate."""
        model = self.model
        made = Pass(self.batch, self.tokens, ITEMSIZE[self.dtype], model.attention, model.experts)
        return {
            stage: stage_activations(model.shape, stage, stage in model.sparse, made)
            for stage in model.stages
        }
