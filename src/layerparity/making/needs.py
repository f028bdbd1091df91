"""Estimate what a stage needs beside its weights, and refuse a batch that no memory holds.

Counted are activations at their peak, keys and values.

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

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layerparity.anatomy.family import OUTSIDE, family_of
from layerparity.anatomy.site import Site
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.machine.memory import host_memory
from layerparity.model.architecture import read_config
from layerparity.ports.opening import open_backend
from layerparity.settings.config import RunKind

if TYPE_CHECKING:
    from layerparity.making.request.inputs import Request
    from layerparity.settings.config import Config

# Bytes of a number, by the run's dtype.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OF_A_GPU = "the largest GPU has"
# What transformers chooses for experts where nobody does.
_EXPERTS = "grouped_mm"


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
    heads differ are counted by the largest, and latent attention as if it kept whole keys. A state
    (mamba, linear attention) does not grow with the tokens, and is not counted.
    """
    site = Site(stage, "in")
    if site.layer is None or site.component not in ("", "self_attn"):
        return 0
    if site.layer in sizes.without_keys:
        return 0
    # A config.json that nobody has checked yet may list fewer blocks than it says.
    window = sizes.windows[site.layer] if site.layer < len(sizes.windows) else 0
    kept = min(tokens, window) if window else tokens
    return 2 * -(-sizes.kv_heads // degree) * sizes.head_dim * kept * batch * itemsize


def reference_mask_bytes(config: Config, batch: int, tokens: int) -> int:
    """Return the bytes of a golden's reference's mask [batch, 1, token, token], on the host.

    It is one precision wider than the run. The clean ways make theirs one at a time.
    """
    if not config.reference.make or config.kind is not RunKind.golden:
        return 0
    wide = 4 if ITEMSIZE[config.dtype.value] == 2 else 8
    return batch * tokens**2 * wide


def refuse_beyond_memory(request: Request, sequences: int, tokens: int, cure: str = "use") -> None:
    """Raise UserError where a batch's activations and cache need more memory than is free.

    ``cure`` is what to do with the seq_len that would fit. Nothing is allocated for it. Weights,
    references but for their masks, and what is recorded come on top of what is counted, so what is
    refused would not have run.
    """
    config, sizes = request.config, sizes_of(request.model)
    room, where = _free(config)
    family = family_of(str(request.model.get("model_type")))
    work = ForwardPass(
        sequences,
        tokens,
        ITEMSIZE[config.dtype.value],
        config.attn_implementation or family.attention or "sdpa",
        config.experts_implementation or open_backend.abilities(config).experts or _EXPERTS,
    )

    sites = {"batch": 1, "tokens": 1, "itemsize": 1}
    attends = any(cache_bytes(sizes, stage, **sites) for stage in request.stages)

    def masks(length: int) -> int:
        made = attends and where != _OF_A_GPU
        return reference_mask_bytes(config, sequences, length) if made else 0

    def needed(length: int) -> int:
        made, new = replace(work, tokens=length), config.generate.max_new_tokens
        size = {"batch": sequences, "tokens": length + new, "itemsize": work.itemsize}
        sparse, stages = bool(sizes.experts), request.stages
        cached = max(cache_bytes(sizes, stage, **size) for stage in stages) if new else 0
        work_bytes = max(stage_activations(sizes, stage, sparse, made) for stage in stages)
        # The golden's own work is done by the time that its reference begins.
        return max(cached + work_bytes, masks(length))

    if room is None or needed(tokens) <= room:
        return
    # It knows the kind of each block, which config.json need not list.
    sizes = sizes_of(read_config(request.model))
    if needed(tokens) <= room:
        return
    fitting = bisect_right(range(1, tokens + 1), room, key=needed)
    fewer = f"{cure} seq_len={fitting} or less" if fitting else f"{cure} fewer sequences"
    if masks(tokens) == needed(tokens):
        fewer += ", or reference.make=false for a golden without noise floors"
    raise UserError(
        f"{sequences} x {tokens} tokens need {bytes_text(needed(tokens))} in {config.dtype.value} "
        f"for what one stage computes with, and {where} {bytes_text(room)} free",
        f"{fewer}; '{program()} job=plan' shows what a run needs.",
    )


def _free(config: Config) -> tuple[int | None, str]:
    """Return the most memory that one stage can have, None where nobody says, and whose it is."""
    known = open_backend.abilities(config).memory_known
    if not known and open_backend.affinity(config.backend.name).score > 1:
        return None, ""
    if known and config.device_map.strategy != "cpu":
        from layerparity.machine.gpus import free_gpu_memory

        gpus = free_gpu_memory()
        if gpus:
            return max(gpus), _OF_A_GPU
    memory = host_memory()
    return memory.free, f"{memory.limit} leaves" if memory.limit else "this machine has"
