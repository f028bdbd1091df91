"""A weight holds other numbers than it should: transposed, another's, random, an expert's lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from random import Random

import torch
from torch import nn

from judging.mutations.base import Mutation, mutation, of_weight
from layerparity.mistakes.block import find, needs, randomise
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.parts import Part, exchange, parts

Write = Callable[[nn.Module, Surgery, torch.Tensor], None]


def foreseen_stored(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield weights that never came, and experts that hold another's or nothing."""
    for part in parts(block):
        if part.half is None and part.view(block).shape[0] == 1:
            yield _never_loaded(part)
        if part.view(block).shape[0] > 1:
            experts = part.view(block).shape[0]
            first = draw.randrange(experts - 1)
            true = ("one_expert",)
            yield _written(part, f"expert {first} lost", _lost(first), true)
            yield _written(part, f"expert {first} holds the next one's", _copied(first), true)

    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield _bias_lost(f"self_attn.{name}")


def strange_stored(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield weights wrong in a way that no rule was written for; their prints show it."""
    all_parts = parts(block)
    for part in all_parts:
        experts, rows, columns = part.view(block).shape
        if min(rows, columns) > 1:
            yield _written(part, "transposed in its first square", _transposed)
        if columns > 1:
            yield _written(part, "its rows reversed", _flipped(1), ("channels_permuted",))
            yield _written(part, "its columns reversed", _flipped(2))
            yield _written(part, "its second half lost", _half_lost)
            yield _written(part, "rounded to eight levels", _levels)
        if experts == 1 and columns > 1:
            yield _written(part, "its sign turned", _times(-1.0), ("scale",))
    # The first of two is what a pass reaches first.
    pairs = list(combinations(all_parts, 2))
    for left, right in draw.sample(pairs, min(len(pairs), 40)):
        if left.view(block).shape == right.view(block).shape and left.half is right.half is None:
            yield _exchanged(left, right)


def _written(part: Part, words: str, write: Write, true: tuple[str, ...] = ()) -> Mutation:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            write(block, surgery, part.view(block))

    story = f"{part.name} {words}"
    return of_weight("stored", story, part, size=1.0, place=(0, 0, 0), plant=plant, true=true)


def _never_loaded(part: Part) -> Mutation:
    """Return a weight that keeps its random initialisation, and is not said to be loaded."""

    def write(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
        deviation = getattr(surgery.config, "initializer_range", 0.02)
        randomise(view, deviation, surgery.generator())

    lost = _written(part, "never loaded", write)
    # What it holds instead is nothing that was altered on the way.
    return replace(lost, never_loaded=(part.path,), true=("never_loaded",))


def _bias_lost(path: str) -> Mutation:
    """Return a projection's bias that stays zero, and is not said to be loaded."""

    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            find(block, f"{path}.bias").zero_()

    return mutation(
        "stored",
        f"{path}.bias never loaded",
        path,
        size=1.0,
        why_not=needs(f"{path}.bias"),
        plant=plant,
        by_weights=True,
        never_loaded=(f"{path}.bias",),
        true=("never_loaded", "offset", "attention_bias_dropped"),
    )


def _lost(expert: int) -> Write:
    def write(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
        view[expert].zero_()

    return write


def _copied(expert: int) -> Write:
    def write(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
        view[expert].copy_(view[expert + 1])

    return write


def _transposed(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
    size = min(view.shape[1:])
    square = view[:, :size, :size]
    square.copy_(square.transpose(1, 2).clone())


def _flipped(axis: int) -> Write:
    def write(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
        view.copy_(view.flip(axis))

    return write


def _half_lost(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
    view[:, view.shape[1] // 2 :].zero_()


def _levels(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
    step = view.abs().amax() / 8
    view.copy_((view / step).round() * step)


def _times(factor: float) -> Write:
    def write(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
        view.mul_(factor)

    return write


def _exchanged(left: Part, right: Part) -> Mutation:
    def write(block: nn.Module, surgery: Surgery, view: torch.Tensor) -> None:
        exchange(view, right.view(block))

    names = {part.name.rpartition(".")[2] for part in (left, right)}
    true = ("projections_exchanged",) if names < {"q_proj", "k_proj", "v_proj"} else ()
    true = ("gate_up_swapped",) if names == {"gate_proj", "up_proj"} else true
    return _written(left, f"exchanged with {right.name}", write, true)
