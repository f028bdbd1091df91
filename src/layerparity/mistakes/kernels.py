"""What an attention core does, worked out from its stored queries, keys, values and context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from layerparity.anatomy.block import ATTENTION_CORE
from layerparity.mistakes.cause import Evidence, Tokens
from layerparity.mistakes.values import ENOUGH, Values, same

_Q, _K, _V = "self_attn:q_rotated", "self_attn:k_rotated", "self_attn.v_proj:out"
# Scores of so many pairs, 128 MB of them, are worked out at a time, and tried some thirty times.
_SCORES = 1 << 24


@dataclass(frozen=True)
class Core:
    """The candidate's own queries [row, head, channel], keys and values [token, group, channel].

    ``context`` is both sides' [row, head, channel]; ``seen`` bool [token, token] who sees whom.
    The ``rows``, int64 [row], are the tokens whose attention is worked out: of a long prompt some,
    evenly spread.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: Values
    seen: torch.Tensor
    scale: float
    rows: torch.Tensor

    @property
    def usual(self) -> list[int]:
        """The group whose keys each head reads by the usual layout."""
        heads, groups = self.query.shape[1], self.key.shape[1]
        return [head // (heads // groups) for head in range(heads)]

    def groups(self) -> list[int] | None:
        """Return the group that each head reads, where one fits it to rounding; else None."""
        read = []
        for head in range(self.query.shape[1]):
            fits = [g for g in range(self.key.shape[1]) if self._fits(head, g)]
            if not fits:
                return None
            read.append(fits[0])
        return read

    def shows(self, seen: torch.Tensor, scale: float = 1.0) -> bool:
        """Say whether another mask, or scores times a factor, gives the candidate's context."""
        factor = self.scale * scale
        cached = self.key, self.value
        made = attended(self.query, cached, self.usual, seen[self.rows], factor)
        return self.context.shows(made)

    def narrowed(self, kind: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is rounded to ``kind``, and the context [row, head, channel] of that."""
        own = [self.query, self.key, self.value]
        rounded = [each.to(kind).double() for each in own]
        sides = {"": own, "queries, keys and values": rounded}
        for words, (query, key, value) in sides.items():
            for scores, shares in product((torch.float64, kind), repeat=2):
                named = [words, scores is kind and "scores", shares is kind and "shares"]
                what = ", ".join(each for each in named if each)
                if what:
                    reads = (self.usual, self.seen[self.rows], self.scale)
                    yield what, attended(query, (key, value), *reads, in_types=(scores, shares))

    def _fits(self, head: int, group: int) -> bool:
        query = self.query[:, head : head + 1]
        cached, seen = (self.key, self.value), self.seen[self.rows]
        made = attended(query, cached, [group], seen, self.scale)
        own = self.context.candidate[:, head : head + 1]
        return same(own, made, 2 * self.context.limit)


def core_of(evidence: Evidence) -> Core | None:
    """Return a failing attention core whose golden is plain causal attention; else None."""
    stored = [evidence.values(each) for each in (_Q, _K, _V, evidence.local)]
    if evidence.part != ATTENTION_CORE or any(each is None for each in stored):
        return None
    query, key, value, context = (each for each in stored if each is not None)
    count, tokens = len(query.golden), evidence.tokens
    if len(tokens.position) != count or query.golden.dim() != 3 or context.golden.dim() != 3:
        return None
    shape = key.golden.shape
    if value.golden.numel() != key.golden.numel() or context.golden.shape != query.golden.shape:
        return None
    size = evidence.fact("query_pre_attn_scalar", query.golden.shape[-1])
    rows = _rows(count, query.golden.shape[1])
    core = Core(
        query.candidate[rows],
        key.candidate,
        value.candidate.reshape(shape),
        Values(context.golden[rows], context.candidate[rows], context.step),
        who_sees(tokens),
        size**-0.5,
        rows,
    )
    reads = (core.usual, core.seen[rows], core.scale)
    golden = attended(query.golden[rows], (key.golden, value.golden.reshape(shape)), *reads)
    return core if core.context.is_golden(golden) else None


def _rows(count: int, heads: int) -> torch.Tensor:
    """Return the tokens of ``count`` whose scores are worked out, int64 [row]; the last is one."""
    most = max(ENOUGH, _SCORES // (count * heads))
    if most >= count:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most, dtype=torch.float64).round().long()


def stretched(context: Values) -> torch.Tensor | None:
    """Return what each token and head of a context [token, head, channel] is multiplied by.

    The factors are [token, head], None where the candidate's is not the golden's times factors that
    differ: attention that weighs its tokens as it should, and all of them too much or too little.
    """
    if context.golden.dim() != 3:
        return None
    squares = context.golden.square().sum(-1).clamp(min=1e-300)
    factors = (context.golden * context.candidate).sum(-1) / squares
    heads = Values(context.golden.flatten(0, 1), context.candidate.flatten(0, 1), context.step)
    alike = float(factors.max() - factors.min()) < context.limit
    shown = heads.shows(factors.flatten()[:, None] * heads.golden)
    return factors if shown and not alike else None


def who_sees(tokens: Tokens, ahead: int = 0) -> torch.Tensor:
    """Return bool [token, token]: each sees those of its row up to itself, and ``ahead`` more."""
    row, at = torch.tensor(tokens.sequence), torch.tensor(tokens.position)
    return (row[:, None] == row) & (at[:, None] + ahead >= at)


def hiding_first(seen: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return who sees whom, bool [token, token], where padded rows do not show their first token.

    That is what comes of a mask that is moved by one along keys which begin with padding.
    """
    firsts = [
        at == 0 and row in tokens.padded
        for row, at in zip(tokens.sequence, tokens.position, strict=True)
    ]
    return seen & ~torch.tensor(firsts)


def attended(
    query: torch.Tensor,
    cached: tuple[torch.Tensor, torch.Tensor],
    reads: list[int],
    seen: torch.Tensor,
    scale: float,
    *,
    in_types: tuple[torch.dtype, torch.dtype] = (torch.float64, torch.float64),
) -> torch.Tensor:
    """Return softmax(q k scale) v [row, head, channel] (Vaswani et al. 2017).

    Head h of the queries [row, head, channel] reads group ``reads[h]`` of the ``cached`` keys and
    values, both [token, group, channel], where bool [row, token] ``seen`` says so. Scores, and
    the shares that softmax makes of them, are rounded to ``in_types``.
    """
    key, value = cached
    scores = torch.einsum("qhc,khc->hqk", query, key[:, reads]) * scale
    scores = scores.to(in_types[0]).double().masked_fill(~seen, -torch.inf)
    shares = scores.softmax(-1).nan_to_num().to(in_types[1]).double()
    return torch.einsum("hqk,khc->qhc", shares, value[:, reads])
