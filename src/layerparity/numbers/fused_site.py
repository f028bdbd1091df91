"""The `SiteSums` of three tensors in one pass of the compiled kernel, on all threads torch has.

Tasks have fixed sizes, and what they yield is added up in order: the sums do not depend on how many
threads there are, nor on which of them was faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from layerparity.numbers import fused, site_kernel
from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.token_factors import explained
from layerparity.numbers.token_sums import CHANNEL, HEAD, WHOLE, SiteSums, Slopes, TokenLayout

# Rows of a task, and its elements: enough to hide what starting one costs.
_ROWS, _TASK = 512, 1 << 18
_Sides = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def takes(sides: _Sides) -> bool:
    """Say whether the kernel can read candidate, golden and reference, of any shape."""
    candidate, golden, reference = sides
    return fused.takes(golden, candidate) and reference.dtype in (torch.float32, torch.float64)


def fused_site_sums(sides: _Sides, scale: torch.Tensor, layout: TokenLayout) -> SiteSums:
    """Return what `site_sums.plain_site_sums` returns, of ``sides`` that the kernel `takes`."""
    tokens, width = sides[0].shape
    cuts, tops = _cuts(width, layout.heads), range(0, tokens, _ROWS)
    # With few tokens a task takes more columns: it has to outlast what starting it costs.
    blocks = _blocks(cuts, max(site_kernel.COLUMNS, _TASK // tokens))
    columns = np.zeros((len(tops), 7, width))
    rows = np.zeros((len(blocks), tokens, 5))
    parts = np.zeros((3, tokens, len(cuts) - 1))
    flat, factors = _flat(sides), (scale.numpy(), scale.square().numpy())
    # All threads take from this one: under the interpreter's lock a task comes once.
    tasks = product(enumerate(tops), enumerate(blocks))

    def run() -> None:
        for (tile, top), (block, each) in tasks:
            own = cuts[each.start : each.stop + 1]
            task = (top, min(top + _ROWS, tokens), own, each.start)
            site_kernel.measure(flat, factors, task, (columns[tile], rows[block], parts))

    fused.in_threads(run, len(tops) * len(blocks))
    with one_thread():
        return _total((columns, rows, parts), scale, layout)


def fused_apart(
    sides: _Sides, weight: torch.Tensor, groups: Sequence[torch.Tensor], slope: torch.Tensor
) -> torch.Tensor:
    """Return what `site_sums.plain_apart` returns, of ``sides`` that the kernel `takes`."""
    flat, weights, found = _flat(sides), weight.numpy(), np.zeros(len(groups))
    tasks = enumerate(zip(groups, slope.tolist(), strict=True))

    def run() -> None:
        for group, (tokens, own) in tasks:
            found[group] = site_kernel.apart(flat, weights, tokens.numpy(), own)

    fused.in_threads(run, len(groups))
    return torch.from_numpy(found)


def _flat(sides: _Sides) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what the kernel reads of candidate, golden and reference, [token, element]."""
    candidate, golden, reference = sides
    wide = reference.contiguous().reshape(-1).numpy()
    return fused.bits(candidate), fused.bits(golden), wide


def _cuts(width: int, heads: int) -> np.ndarray:
    """Return where the parts of a row begin and the last one ends; none is in two heads."""
    head, most = width // max(1, heads), site_kernel.COLUMNS
    starts = [each for first in range(0, width, head) for each in range(first, first + head, most)]
    return np.array([*starts, width])


def _blocks(cuts: np.ndarray, most: int) -> list[range]:
    """Return ranges of neighbouring parts, each of so many columns at most."""
    blocks, first = [], 0
    for part in range(1, len(cuts)):
        if part == len(cuts) - 1 or cuts[part + 1] - cuts[first] > most:
            blocks.append(range(first, part))
            first = part
    return blocks


def _total(found: tuple[np.ndarray, ...], scale: torch.Tensor, layout: TokenLayout) -> SiteSums:
    """Add up what the tasks found; ``scale`` is float64 [element]."""
    columns, rows, parts = (torch.from_numpy(each) for each in found)
    by_element, by_token = columns.sum(0), rows.sum(0).T.contiguous()
    error, difference, p, q, pp, pq, qq = by_element
    squared, square, weighed, own, offset = by_token
    heads = max(1, layout.heads)
    # A head that is longer than a part has several of them, and each head as many.
    by_head = parts if parts.shape[2] == heads else parts.unflatten(-1, (heads, -1)).sum(-1)
    products, squares, shared = by_head.sum(-1)
    slopes = {WHOLE: Slopes.of(products.unsqueeze(1), squares.unsqueeze(1))}
    explains = {WHOLE: explained(shared.unsqueeze(1), squares.unsqueeze(1), dim=1)}
    if HEAD in layout.groupings:
        slopes[HEAD] = Slopes.of(by_head[0], by_head[1])
        explains[HEAD] = explained(by_head[2], by_head[1], dim=1)
    # The kernel adds columns without weights: one column has one weight, put on at the end.
    slopes[CHANNEL] = Slopes(p, q, pp, pq, qq, len(square)).scaled(scale.square())
    offsets = offset.unsqueeze(1)
    return SiteSums(
        error_tokens=squared,
        square_tokens=square,
        error_elements=error,
        square_elements=q,
        products=products,
        squares=squares,
        differences=difference * scale,
        weighed=weighed,
        shared=explains,
        slopes=slopes,
        offset=Slopes.of(offsets, torch.full_like(offsets, layout.elements)),
        own=float(own.sum()),
    )
