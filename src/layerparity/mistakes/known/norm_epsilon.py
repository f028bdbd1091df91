"""A norm has another epsilon than the model's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from layerparity.mistakes.block import epsilon_name
from layerparity.mistakes.fault import Fault, Surgery

# What models and libraries have, and what comes of a digit lost.
_USUAL = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield every norm of a block with the other usual epsilons."""
    for path, norm in block.named_modules():
        own = getattr(norm, epsilon_name(norm), None)
        if "norm" in path.rpartition(".")[2] and isinstance(own, float):
            for epsilon in _USUAL:
                if epsilon != own:
                    yield _other(path, epsilon, own)


def _other(path: str, epsilon: float, own: float) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        norm = block.get_submodule(path)
        surgery.set(norm, epsilon_name(norm), epsilon)

    words = f"the epsilon of {path} is {epsilon:g} (the model's is {own:g})"
    return Fault(f"{path} epsilon {epsilon:g}", words, path, "norm_epsilon", plant=plant)


TRIES = tries
