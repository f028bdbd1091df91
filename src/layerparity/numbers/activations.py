"""Activations as kernels of few bits are given them: each in the steps of a scale, to its type.

A kernel multiplies packed weights by activations that it packed, too. Which way belongs to the
weight: numbers that share a scale are a token's channels, groups of these, or all there are; the
scale is taken from them, or was measured beforehand and stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# By type: the largest number. Of FP4: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3.
LARGEST = {"FP8": 448.0, "INT8": 127.0, "FP4": 6.0}
# The largest power of two in the floating ones.
_LARGEST_POWER = {"FP8": 8, "FP4": 2}
# Groups that the same specification (6.3) scales by the power of their largest number.
_MX = 32
# Smaller than any scale that a kernel divides by.
_LEAST = 1e-12


class Activations(NamedTuple):
    """How what is multiplied by a weight is rounded: to the ``kind`` of `LARGEST`.

    ``group`` channels of a token share a scale, 0 for all of them; ``whole`` for all tokens, too.
    With ``fixed`` scale none is taken from the numbers, but of groups, whose own are e4m3 numbers
    in units of it (NVFP4). ``powers`` says that scales are powers of two.
    """

    kind: str
    group: int = 0
    whole: bool = False
    fixed: float = 0.0
    powers: bool = False

    def __str__(self) -> str:
        shared = f"groups of {self.group}" if self.group else "tokens"
        shared = "tensors" if self.whole or (self.fixed and not self.group) else shared
        return f"{self.kind} by {shared}"

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [..., channel] of any floating type, rounded so, in their own type."""
        if not values.numel():
            # An expert that got no token.
            return values
        wide = values.float()
        channels = wide.shape[-1]
        grouped = self.group and channels % self.group == 0
        groups = wide.unflatten(-1, (-1, self.group)) if grouped else wide
        unit = self._unit(groups)
        return (_to(self.kind, groups / unit) * unit).reshape(values.shape).to(values.dtype)

    def _unit(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the scale of each group [..., channel]: [..., 1]."""
        import torch

        if self.fixed and not self.group:
            return torch.full_like(groups[..., :1], self.fixed)
        if self.whole:
            largest = groups.abs().amax().expand(groups[..., :1].shape)
        else:
            largest = groups.abs().amax(-1, keepdim=True)
        if self.kind == "FP4" and self.fixed:
            steps = (largest / LARGEST["FP4"] / self.fixed).clamp(max=LARGEST["FP8"])
            return (steps.to(torch.float8_e4m3fn).float() * self.fixed).clamp(min=_LEAST)
        if self.powers and self.kind in _LARGEST_POWER and self.group == _MX:
            exponents = torch.frexp(largest.clamp(min=_LEAST)).exponent - 1
            return torch.exp2((exponents - _LARGEST_POWER[self.kind]).float())
        unit = (largest / LARGEST[self.kind]).clamp(min=_LEAST)
        return torch.exp2(unit.log2().ceil()) if self.powers else unit


def _to(kind: str, steps: torch.Tensor) -> torch.Tensor:
    """Return numbers [..., channel] rounded to a type, float32."""
    import torch

    most = LARGEST[kind]
    steps = steps.clamp(-most, most)
    if kind == "INT8":
        return steps.round()
    if kind == "FP8":
        return steps.to(torch.float8_e4m3fn).float()
    size = steps.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (steps / step).round() * step
