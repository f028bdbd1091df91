"""Cache: the bytes of keys and values that decoding keeps."""

from __future__ import annotations

from layerparity.fit.shape import Shape
from layerparity.site import Site


def cache_bytes(
    shape: Shape, stage: str, *, batch: int, tokens: int, itemsize: int, degree: int = 1
) -> int:
    """Return the bytes a stage's keys and values take on one of ``degree`` devices, exactly.

    2 * KV heads * head_dim * tokens * batch * itemsize for each block: what transformers' static
    cache allocates. A block with a sliding window keeps no more tokens than its window. KV heads
    are split over the devices, and repeated where there are fewer heads than devices.
    """
    site = Site(stage, "in")
    if site.layer is None or site.component not in ("", "self_attn"):
        return 0
    window = shape.windows[site.layer]
    kept = min(tokens, window) if window else tokens
    return 2 * -(-shape.kv_heads // degree) * shape.head_dim * kept * batch * itemsize
