"""Perturb: an input as another machine's last rounding might have left it."""

from __future__ import annotations

import torch


def perturbed(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return ``values`` (floating, any shape) with noise of half a unit in the last place (RMS).

    A quarter of the elements move to a neighbouring number, up or down: seeded, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    dice = torch.randint(0, 8, values.shape, generator=generator).to(values.device)
    infinity = torch.full_like(values, torch.inf)
    up, down = torch.nextafter(values, infinity), torch.nextafter(values, -infinity)
    return torch.where(dice == 0, up, torch.where(dice == 1, down, values))
