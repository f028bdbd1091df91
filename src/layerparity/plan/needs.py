"""Activations: an estimate of the largest memory a stage's tensors take while it computes.

The formulas count the tensors that transformers' own modules hold at once, in inference, one stage
at a time. They are estimates: kernels take scratch memory of their own, and an allocator rounds up.
A test holds them against measured peaks of small blocks, to a factor of 2. With T = batch * tokens
and b bytes an element:

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
from typing import Any

from layerparity.anatomy.family import OUTSIDE
from layerparity.anatomy.site import Site


@dataclass(frozen=True)
class Pass:
    """One forward pass: its size, and the implementations it computes with."""

    batch: int
    tokens: int
    itemsize: int
    attention: str
    experts: str


def stage_activations(shape: Shape, stage: str, sparse: bool, made: Pass) -> int:
    """Return the bytes of activations a stage needs at its peak; ``sparse``: it holds experts."""
    site, rows, item = Site(stage, "in"), made.batch * made.tokens, made.itemsize
    if stage == OUTSIDE["head"]:
        return rows * (shape.hidden + shape.vocabulary) * item
    if stage == OUTSIDE["embedding"]:
        return rows * (shape.hidden * item + 8)
    mlp = _experts(shape, made) if sparse else rows * 3 * (shape.hidden + shape.intermediate) * item
    parts = {"self_attn": _attention(shape, made), "mlp": mlp}
    if site.layer is not None and site.component == "":
        return max(parts.values())
    return parts.get(site.component, rows * shape.hidden * (2 * item + 8))


def _attention(shape: Shape, made: Pass) -> int:
    rows, item = made.batch * made.tokens, made.itemsize
    width = shape.heads * shape.head_dim
    projected = width + 2 * shape.kv_heads * shape.head_dim
    size = rows * ((2 * shape.hidden + projected) * item + width * max(3 * item, item + 8))
    if made.attention == "eager":
        score = item + (item if item >= 4 else 8)
        size += made.batch * shape.heads * made.tokens**2 * score
    return size


def _experts(shape: Shape, made: Pass) -> int:
    item, wide = made.itemsize, max(4, made.itemsize)
    hidden, inner = shape.hidden, shape.expert_intermediate
    tokens = made.batch * made.tokens
    row = hidden * item + max(4 * inner * item, hidden * (item + 2 * wide))
    size = tokens * (3 * hidden * item + 12 * shape.experts)
    if made.experts == "eager":
        return size + tokens * row
    if made.experts == "static":
        from layerparity.model.static_experts import CHUNK_BYTES

        # As static_experts.chunk_size counts them, weights included.
        one = 3 * hidden * inner * item + 16 * tokens * max(hidden, 2 * inner)
        chunk = max(1, min(shape.experts, CHUNK_BYTES // one))
        computed = chunk * max(4 * inner * item, hidden * (item + 3 * wide))
        routing = 5 * shape.experts * shape.top_k
        return size + tokens * (computed + routing + 2 * hidden * wide)
    gathered = 3 * hidden * inner * item if made.experts == "batched_mm" else 0
    return size + tokens * shape.top_k * (row + gathered)


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


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_WINDOWED = "sliding_attention"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in elements.

    ``experts`` and ``top_k`` are 0 for a dense model. ``windows`` holds, for each block, the number
    of tokens its attention looks back, or 0 for all of them.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    expert_intermediate: int
    experts: int
    top_k: int
    vocabulary: int
    windows: tuple[int, ...]


def shape_of(config: Any) -> Shape:
    """Return the shape that transformers' configuration describes."""
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    intermediate = int(_first(text, ("intermediate_size",)) or 4 * hidden)
    experts = _first(text, _EXPERTS)
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=_first(text, ("num_key_value_heads",)) or heads,
        head_dim=_first(text, ("head_dim",)) or hidden // heads,
        intermediate=intermediate,
        expert_intermediate=_first(text, ("moe_intermediate_size",)) or intermediate,
        experts=experts,
        top_k=_first(text, _TOP_K) or 1 if experts else 0,
        vocabulary=int(text.vocab_size),
        windows=_windows(text),
    )


def _first(text: Any, names: tuple[str, ...]) -> int:
    """Return the first of some keys that is a number above 0, or 0."""
    found = (getattr(text, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), 0)


def _windows(text: Any) -> tuple[int, ...]:
    window = _first(text, ("sliding_window",))
    kinds = getattr(text, "layer_types", None) or [""] * int(text.num_hidden_layers)
    return tuple(window if kind == _WINDOWED else 0 for kind in kinds)
