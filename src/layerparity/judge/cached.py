"""What is cached of a block at the end of a variation, held against what is right there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# A row is another one from this part of its own size on, or from so many steps of its type on:
# what rounding moves is far less, and another token's is off by all of it. Between one and two of
# the steps it may be either, as of a cache of few bits.
_APART, _STEPS, _SURELY = 0.01, 16, 2
# What has a row for each token.
_ROWS = ("keys", "values")


@dataclass(frozen=True)
class CachedApart:
    """Rows of a ``name`` (keys, values, a state) that are not the right ones.

    ``tokens`` are sequence and position, counted from 0, without padding; none for a state.
    ``heads`` are those that are off, empty where all are. ``empty`` says that the rows are zeros.
    """

    name: str
    tokens: tuple[tuple[int, int], ...] = ()
    heads: tuple[int, ...] = ()
    empty: bool = False


def surely_right(
    varied: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], mask: torch.Tensor
) -> bool:
    """Say whether a cache is right beyond doubt, and holds all; arguments are `cached_apart`'s."""
    return holds_all(right, mask) and not cached_apart(varied, right, mask, _SURELY)


def cached_apart(
    varied: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    steps: int = _STEPS,
) -> list[CachedApart]:
    """Return what differs between two caches of a block, by name as `Port.cache_rows` gives them.

    ``mask`` is int64 [batch, seen token], 1 for real tokens; rounding moves by less than ``steps``.
    """
    found = []
    for name, held in varied.items():
        sound = right.get(name)
        if sound is None or sound.shape != held.shape:
            continue
        limit = max(_APART, steps * torch.finfo(held.dtype).eps)
        mine, other = held.double(), sound.double()
        if name not in _ROWS:
            # NaN is no agreement.
            if not float((mine - other).norm()) <= limit * float(other.norm()):
                found.append(CachedApart(name))
            continue
        # A window keeps the last tokens alone.
        real = mask.bool()[:, -mine.shape[1] :]
        size = other[real].norm(dim=-1).square().mean().sqrt()
        off = ~((mine - other).norm(dim=-1) <= limit * size) & real[..., None]
        rows = off.any(-1)
        if not bool(rows.any()):
            continue
        counted = mask.cumsum(-1)[:, -mine.shape[1] :] - 1
        places = rows.nonzero().tolist()
        heads = off.flatten(0, 1).any(0)
        found.append(
            CachedApart(
                name,
                tuple((row, int(counted[row, column])) for row, column in places),
                () if bool(heads.all()) else tuple(heads.nonzero().flatten().tolist()),
                not bool(mine[rows].any()),
            )
        )
    return found


def holds_all(held: Mapping[str, torch.Tensor], mask: torch.Tensor) -> bool:
    """Say whether a cache holds each token that was seen: a window, or a state, may forget some.

    ``mask`` is int64 [batch, seen token].
    """
    return bool(held) and all(
        name in _ROWS and each.shape[1] == mask.shape[1] for name, each in held.items()
    )


def in_words(apart: Sequence[CachedApart], block: str, *, surely: bool = True) -> str:
    """Return what is said of a block's cache, of which parts are ``apart``.

    Where none is, and it is not ``surely`` right, nothing is.
    """
    if not apart:
        right = "it is read, masked or placed wrongly, or written too late, or it is not the cache"
        return f"what {block} has cached is right at the end: {right}" if surely else ""
    said = []
    for each in apart:
        words = f"the {each.name}"
        if each.tokens:
            row, first = each.tokens[0]
            own = [position for sequence, position in each.tokens if sequence == row]
            last = own[-1]
            words += f" of token {first}" if len(own) == 1 else f" of tokens {first} to {last}"
            if len(own) != last - first + 1:
                words += f" ({len(own)} of them)"
            words += f" of sequence {row}" if row else ""
            words += f", heads {', '.join(map(str, each.heads))}" if each.heads else ""
            words += ", which are zeros" if each.empty else ""
        said.append(words)
    return f"what {block} has cached is wrong: {'; '.join(said)}"
