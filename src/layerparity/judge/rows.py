"""Rows: two tensors of one site as chunks of [real token, everything else], padding left out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.numbers.metric import Chunk

# Elements of a chunk: enough work for many threads, and a bound for what has to be copied.
SIZE = 1 << 22


def has_tokens(axes: tuple[str, ...]) -> bool:
    """Return whether a tensor with these axes has a row for every token."""
    return "token" in axes


def chunks(
    golden: torch.Tensor,
    candidate: torch.Tensor,
    axes: tuple[str, ...],
    mask: torch.Tensor | None = None,
    close: Closeness = CLOSE,
) -> Iterator[Chunk]:
    """Yield chunks of two tensors of one shape, each of about `SIZE` elements.

    With a token axis, a chunk is [tokens, elements of a token], in batch-major order, of the tokens
    that ``mask`` (bool [batch, token]; None for all) names. Without, it is flat. ``close`` says
    which elements are similar.
    """
    if not has_tokens(axes):
        flat, other = golden.reshape(-1), candidate.reshape(-1)
        for start in range(0, flat.numel(), SIZE):
            yield Chunk(flat[start : start + SIZE], other[start : start + SIZE], close)
        return
    left, right = by_token(golden, axes), by_token(candidate, axes)
    where = torch.nonzero(real_tokens(left, mask).reshape(-1)).reshape(-1)
    step = max(1, SIZE // max(1, left[:1, :1].numel()))
    for start in range(0, where.numel(), step):
        tokens = where[start : start + step]
        yield Chunk(_rows(left, tokens), _rows(right, tokens), close)


def _rows(view: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the named tokens, numbered batch-major, of a [batch, token, ...] view as [n, width].

    A stretch of tokens that stand together is itself a view; others are gathered.
    """
    shape = (tokens.numel(), view.shape[2:].numel())
    first, last = int(tokens[0]), int(tokens[-1])
    if view.is_contiguous() and last - first + 1 == tokens.numel():
        return view.flatten(0, 1)[first : last + 1].reshape(shape)
    batch, token = tokens // view.shape[1], tokens % view.shape[1]
    return view[batch, token].reshape(shape)


def by_token(tensor: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Return a tensor with a token axis as a view [batch, token, ...]; batch may be 1."""
    if "batch" not in axes:
        return tensor.movedim(axes.index("token"), 0).unsqueeze(0)
    return tensor.movedim((axes.index("batch"), axes.index("token")), (0, 1))


def places(
    tokens: torch.Tensor, real: torch.Tensor, positions: torch.Tensor | None = None
) -> list[tuple[int, int]]:
    """Return of each token its sequence, and its position there; padding counts for nothing.

    ``tokens``, int64 [n], numbers them batch-major; ``real`` is bool [batch, token]. Where not all
    tokens of a prompt are there, ``positions``, int64 of that shape, say where each stands.
    """
    if positions is None or positions.shape != real.shape:
        positions = real.long().cumsum(-1) - 1
    before = positions.flatten()
    return [(each // real.shape[1], int(before[each])) for each in tokens.tolist()]


def real_tokens(view: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mask, or bool [batch, token] of a [batch, token, ...] view that names all."""
    return torch.ones(view.shape[:2], dtype=torch.bool) if mask is None else mask
