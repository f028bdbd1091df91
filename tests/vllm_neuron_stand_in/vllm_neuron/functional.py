"""References of the kernels, in torch: a prompt's attention, and that of a step over the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of [head, token, channel] by [token, channel]."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [..., head, token, channel] of queries over keys, where ``seen``, bool, says so.

    ``sinks`` [head] is a score that takes its share and gives nothing.
    """
    times = queries.shape[-3] // keys.shape[-3]
    keys, values = keys.repeat_interleave(times, -3), values.repeat_interleave(times, -3)
    if sinks is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale
        )
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    sunk = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sunk], -1)
    shares = (shares - shares.amax(-1, keepdim=True)).softmax(-1, dtype=torch.float32)
    return shares[..., :-1].to(values.dtype) @ values


def flash_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention over one request's own tokens, [head, token, channel]; it knows no others.

    Each token sees those before it and itself, the last ``window`` of them.
    """
    places = torch.arange(queries.shape[1])
    apart = places[:, None] - places[None]
    seen = (apart >= 0) & (apart < (window or len(places)))
    return _attended(queries, keys, values, seen, scale, sinks)


def write_cache(cache: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Put [head, token, channel] into [block, head, token in block, channel] at slots [token]."""
    size = cache.shape[2]
    cache[slots // size, :, slots % size] = values.transpose(0, 1).to(cache.dtype)


def attention_decode(
    queries: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    told: dict[str, Any],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of each request's newest token over its blocks, [head, request, channel].

    ``queries`` are in the same form; what is newest stands in the cache already.
    """
    tables = told["block_table_tensor"].long()
    # [request, block, head, token in block, channel] to [request, head, token, channel].
    keys, values = (each[tables].transpose(1, 2).flatten(2, 3) for each in caches)
    places = torch.arange(keys.shape[2])[None]
    newest = told["cached_seq_len"].long()[:, None]
    seen = (places <= newest) & (places > newest - (window or keys.shape[2]))
    found = _attended(
        queries.transpose(0, 1)[:, :, None],
        keys.to(queries.dtype),
        values.to(queries.dtype),
        seen[:, None, None],
        scale,
        sinks,
    )
    return found[:, :, 0].transpose(0, 1)
