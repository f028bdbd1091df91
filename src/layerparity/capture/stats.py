"""Statistics of one tensor, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 20


def statistics(tensor: torch.Tensor) -> dict[str, float]:
    """Return mean, std (population), min, max, l2, rms and the counts of NaN and Inf.

    Moments cover the finite elements, accumulated in float64 a chunk at a time, so that nothing
    of the tensor's size is allocated; an empty tensor, or one without a finite element, has zeros.
    """
    import torch

    flat = tensor.detach().reshape(-1)
    count, total, square = 0, 0.0, 0.0
    low, high = float("inf"), float("-inf")
    nan = inf = 0
    for chunk in flat.split(CHUNK) if flat.numel() else ():
        values = chunk.to(torch.float64)
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        finite = values[values.isfinite()]
        if finite.numel() == 0:
            continue
        count += finite.numel()
        total += float(finite.sum())
        square += float(finite.square().sum())
        low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    mean = total / count if count else 0.0
    variance = max(square / count - mean * mean, 0.0) if count else 0.0
    return {
        "mean": mean,
        "std": variance**0.5,
        "min": low if count else 0.0,
        "max": high if count else 0.0,
        "l2": square**0.5,
        "rms": (square / count) ** 0.5 if count else 0.0,
        "nan": float(nan),
        "inf": float(inf),
    }
