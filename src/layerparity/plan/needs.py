"""Estimate what a stage needs beside its weights: activations at their peak, keys and values.

The formulas of activations count the tensors that transformers' own modules hold at once, in
inference, one stage at a time. They are estimates: kernels take scratch memory of their own, and an
allocator rounds up. A test holds them against measured peaks of small blocks, to a factor of 2.
With T = batch * tokens and b bytes an element:

- attention: T * (2 H + (h + 2 k) d) * b, and T h d * max(3 b, b + 8) for rotation, repeated keys
  and values, or a norm in float32; eager attention also has batch * h * tokens^2 scores, each of b
  bytes and twice 4 (2 b where b is 4 or more);
- dense MLP: T * (3 H + 3 I) * b;
- experts: T * (3 H * b + 12 E), and for each of the R = T * top_k rows H b + max(4 I b, H (b + 8)),
  since the rows are weighted in float32. ``eager`` experts take one expert's rows, at most T, at a
  time; ``batched_mm`` also gathers 3 H I weights for each row; ``static`` ones compute every token
  by every expert, C at once by their bound on memory: T * (C * max(4 I b, H (b + 12)) + 8 H +
  5 E top_k) in place of the rows;
- head: T * (H + vocabulary) * b; embedding: T * (H b + 8); norm: T * H * (2 b + 8).

H is the hidden size, h and k heads and KV heads of d channels, I the intermediate size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.anatomy.family import OUTSIDE
from layerparity.anatomy.site import Site
from layerparity.anatomy.sizes import ModelSizes


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: its size, and the implementations it computes with."""

    batch: int
    tokens: int
    itemsize: int
    attention: str
    experts: str


def stage_activations(sizes: ModelSizes, stage: str, sparse: bool, work: ForwardPass) -> int:
    """Return the bytes of activations a stage needs at its peak; ``sparse``: it holds experts."""
    site, rows, item = Site(stage, "in"), work.batch * work.tokens, work.itemsize
    if stage == OUTSIDE["head"]:
        return rows * (sizes.hidden + sizes.vocabulary) * item
    if stage == OUTSIDE["embedding"]:
        return rows * (sizes.hidden * item + 8)
    mlp = _experts(sizes, work) if sparse else rows * 3 * (sizes.hidden + sizes.intermediate) * item
    parts = {"self_attn": _attention(sizes, work), "mlp": mlp}
    if site.layer is not None and site.component == "":
        return max(parts.values())
    return parts.get(site.component, rows * sizes.hidden * (2 * item + 8))


def _attention(sizes: ModelSizes, work: ForwardPass) -> int:
    rows, item = work.batch * work.tokens, work.itemsize
    width = sizes.heads * sizes.head_dim
    projected = width + 2 * sizes.kv_heads * sizes.head_dim
    total = rows * ((2 * sizes.hidden + projected) * item + width * max(3 * item, item + 8))
    if work.attention == "eager":
        score = item + (item if item >= 4 else 8)
        total += work.batch * sizes.heads * work.tokens**2 * score
    return total


def _experts(sizes: ModelSizes, work: ForwardPass) -> int:
    item, wide = work.itemsize, max(4, work.itemsize)
    hidden, inner = sizes.hidden, sizes.expert_intermediate
    tokens = work.batch * work.tokens
    row = hidden * item + max(4 * inner * item, hidden * (item + 2 * wide))
    fixed = tokens * (3 * hidden * item + 12 * sizes.experts)
    if work.experts == "eager":
        return fixed + tokens * row
    if work.experts == "static":
        from layerparity.model.static_experts import CHUNK_BYTES

        # As static_experts.chunk_size counts them, weights included.
        one = 3 * hidden * inner * item + 16 * tokens * max(hidden, 2 * inner)
        chunk = max(1, min(sizes.experts, CHUNK_BYTES // one))
        computed = chunk * max(4 * inner * item, hidden * (item + 3 * wide))
        routing = 5 * sizes.experts * sizes.top_k
        return fixed + tokens * (computed + routing + 2 * hidden * wide)
    gathered = 3 * hidden * inner * item if work.experts == "batched_mm" else 0
    return fixed + tokens * sizes.top_k * (row + gathered)


def cache_bytes(
    sizes: ModelSizes, stage: str, *, batch: int, tokens: int, itemsize: int, degree: int = 1
) -> int:
    """Return the bytes a stage's keys and values take on one of ``degree`` devices.

    2 * KV heads * head_dim * tokens * batch * itemsize for each block: what transformers' static
    cache allocates. A block with a sliding window keeps no more tokens than its window. KV heads
    are split over the devices, and repeated where there are fewer heads than devices. Blocks whose
    heads differ are counted by the largest, and latent attention as if it kept whole keys.
    """
    site = Site(stage, "in")
    if site.layer is None or site.component not in ("", "self_attn"):
        return 0
    window = sizes.windows[site.layer]
    kept = min(tokens, window) if window else tokens
    return 2 * -(-sizes.kv_heads // degree) * sizes.head_dim * kept * batch * itemsize
