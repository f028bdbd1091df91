"""Whether a rank's keys and values are those of its queries: only their place in a rank says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from layerparity.ports.ranks.side import Held

_QUERIES = ".q_proj."


def of_own_queries(held: Mapping[str, Held], heads: int, keys: int) -> dict[str, Held]:
    """Return what a rank holds, with keys and values in the place of those that its queries read.

    Each of ``keys`` heads is read by as many of ``heads`` queries, that stand beside each other. A
    rank's attention reads its own alone: a head of others is one that differs.
    """
    found = dict(held)
    for name, queries in held.items():
        if _QUERIES not in name:
            continue
        read = (_heads(queries.mask, heads) // (heads // keys)).unique()
        for letter in "kv":
            own = name.replace(_QUERIES, f".{letter}_proj.")
            if own not in held:
                continue
            each = held[own]
            has = _heads(each.mask, keys)
            if len(has) == len(read) and not torch.equal(has, read):
                values, mask = torch.zeros_like(each.values), torch.zeros_like(each.mask)
                for moved, old in ((values, each.values), (mask, each.mask)):
                    moved.unflatten(0, (keys, -1))[read] = old.unflatten(0, (keys, -1))[has]
                found[own] = replace(each, values=values, mask=mask, differs=True)
    return found


def _heads(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the heads that rows of a mask [channel, ...] are of, int64 [head], ascending."""
    return mask.reshape(count, -1).any(1).nonzero().flatten()
