"""Numbers at the end: two models' logits compared as reviewers quote them, position by position.

All are computed in float64. A token of the vocabulary that either side rules out (a logit of minus
infinity, as of a padded vocabulary) is left out of its position's numbers on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from layerparity.numbers.floor import LEAST

# The most likely tokens whose logits are compared, by the name of the number; None: all tokens.
TOP: dict[str, int | None] = {
    "top_5_error": 5,
    "top_50_error": 50,
    "top_1000_error": 1000,
    "top_all_error": None,
}
# What NxD Inference allows an absolute error to be before it counts (its tolerance maps).
_ABSOLUTE = 1e-5
# Numbers of a piece: a row of a large vocabulary has 200,000, and is held in float64 several times.
_PIECE = 1 << 22


_AGREEMENT, _PERPLEXITY = "top1_agreement", "perplexity_ratio"
_SQUARED = ("kl_mean", "kl_p99", "kl_max", "nmse")
_MEANS = ("kl_mean", "logp_mean", "nmse")


def next_tokens(
    logits: torch.Tensor,
    mask: torch.Tensor,
    ids: torch.Tensor | None = None,
    columns: Sequence[int] = (),
) -> torch.Tensor:
    """Return the token that follows each, int64 [batch, token]; -1 where that is not known.

    It stands in ``ids``, int64 [batch, token]. After a sequence's last real token, by ``mask``,
    bool [batch, token], comes the likeliest by ``logits``, floating [batch, token, vocabulary]:
    generation is greedy. With ``columns`` the logits are those of these tokens alone.
    """
    follows = torch.zeros_like(mask)
    follows[:, :-1] = mask[:, 1:]
    # What the roll gives the last place is the first token, and is not taken: nothing follows.
    known = torch.full(mask.shape, -1) if ids is None else ids.long().roll(-1, 1)
    if columns:
        follows, known = (each[:, list(columns)] for each in (follows, known))
    return torch.where(follows, known, logits.argmax(-1))


def unlike(ids: torch.Tensor | None, tokens: torch.Tensor, shape: torch.Size) -> int:
    """Return how many of some tokens are computed from other tokens than each other.

    ``tokens`` are numbers within ``shape``, [batch, token]: that of ``ids``, int64, or of one token
    after each of its sequences. Without ``ids`` all are unlike. A prompt that fills a batch several
    times has its errors several times.
    """
    if ids is None or ids.shape[0] != shape[0] or shape[1] not in (1, ids.shape[1]):
        return tokens.numel()
    # A sum of the ids so far, each times a number of its place, modulo 2^64: it tells them apart.
    draw = torch.Generator().manual_seed(0)
    # Each id is raised by one: a zero would add nothing, and its token would not be told apart.
    before = ((ids.long() + 1) * torch.randint(1 << 62, ids.shape[1:], generator=draw)).cumsum(1)
    if shape[1] == 1:
        before = before[:, -1:]
    return int(before.flatten()[tokens].unique().numel())


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of q from p in nats, sum p (log p - log q), over the last axis.

    Both are log-probabilities; what has none on either side counts for nothing.
    """
    # Minus infinity less itself is NaN: what is ruled out becomes 0 before anything is added.
    both = (p > -math.inf) & (q > -math.inf)
    # Rounding leaves less than nothing of two that hardly differ.
    return (p.exp() * (p - q)).masked_fill(~both, 0.0).sum(-1).clamp_min(0.0)


def sizes(found: dict[str, float]) -> dict[str, float]:
    """Return numbers as errors that grow as rounding does: 0 where equal, twice for twice of it.

    A divergence grows with its square. Of an agreement it is the share that does not agree, of two
    perplexities how far their logarithms are apart.
    """
    errors = {name: value for name, value in found.items() if name not in _SQUARED}
    errors |= {name: math.sqrt(max(found[name], 0.0)) for name in _SQUARED if name in found}
    if _AGREEMENT in found:
        errors[_AGREEMENT] = 1.0 - found[_AGREEMENT]
    if _PERPLEXITY in found:
        # One that float64 cannot hold is 0 or infinite.
        with np.errstate(divide="ignore"):
            errors[_PERPLEXITY] = float(np.abs(np.log(found[_PERPLEXITY])))
    return errors


def of_so_many(clean: Mapping[str, float], positions: int) -> dict[str, float]:
    """Return the `largest` of clean ways, as they may be at so many unlike positions by chance.

    A count of tokens that are rarely another one scatters by its root, as counts of rare events do;
    one more may always be. In a perplexity errors of either sign cancel each other, in some ways by
    luck: the mean of n independent normal errors whose mean size is m scatters by m sqrt(pi / 2n).
    """
    found = dict(clean)
    if _AGREEMENT in clean:
        others = clean[_AGREEMENT] * positions
        found[_AGREEMENT] = (others + math.sqrt(others) + 1.0) / positions
    if _PERPLEXITY in clean:
        scatter = clean["logp_mean"] * math.sqrt(math.pi / 2.0 / positions)
        found[_PERPLEXITY] = max(clean[_PERPLEXITY], scatter)
    return found


def largest(ways: Iterable[dict[str, float]], epsilon: float, scale: float) -> dict[str, float]:
    """Return the largest of several `sizes`, by name, none less than rounding explains.

    ``epsilon`` is that of the ways' type and ``scale`` the largest of the logits: clean ways may
    happen to agree to the bit. Two numbers have no such least: `of_so_many` gives it.
    """
    found: dict[str, float] = {}
    for each in ways:
        for name, value in each.items():
            # Errors in nats grow with the logits; the others are over the logits' size already.
            one = epsilon * (1.0 if name in (*TOP, "nmse") else scale)
            least = one * (LEAST if name in _MEANS else 1.0)
            least = 0.0 if name in (_AGREEMENT, _PERPLEXITY) else least
            found[name] = max(value, found.get(name, least))
    return found


def at_the_end(
    golden: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor | None = None
) -> dict[str, float]:
    """Return the numbers of `AtTheEnd` of all positions; arguments as `AtTheEnd.feed` has them."""
    end = AtTheEnd()
    end.feed(golden, candidate, labels)
    return end.results()


@dataclass
class AtTheEnd:
    """The numbers of a candidate's logits against a golden's, fed some positions at a time.

    - ``kl_mean``, ``kl_p99``, ``kl_max``: Kullback-Leibler divergence of the candidate's next-token
      distribution from the golden's, sum p (log p - log q), in nats, over the positions.
    - ``top1_agreement``: part of the positions whose likeliest token is the same one.
    - ``top_5_error``, ... ``top_all_error``: the largest error among the golden's k likeliest
      tokens, less 1e-5, over the largest of their logits; of the position where it is largest. The
      candidate's logits are taken less the intercept of their regression on the golden's, since
      adding a number to all logits changes nothing (NxD Inference's logit validation).
    - ``logp_mean``, ``logp_max``: |log q - log p| of the golden's own next tokens, in nats.
    - ``perplexity_ratio``: the candidate's perplexity of these tokens over the golden's.
    - ``nmse``: sum (candidate - golden)^2 over sum golden^2.
    """

    _kl: list[np.ndarray] = field(default_factory=list)
    _same: int = 0
    _positions: int = 0
    _top: dict[str, float] = field(default_factory=dict)
    _moved: list[np.ndarray] = field(default_factory=list)
    _squares: tuple[float, float] = (0.0, 0.0)

    def feed(
        self, golden: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor | None = None
    ) -> None:
        """Take some positions: floating [position, vocabulary]; ``labels`` are int64 [position].

        Labels are the golden's next tokens; -1 where it has none. Without labels the golden's
        likeliest tokens stand for them. Raises ValueError for shapes that differ, and for a
        position where no token is left.
        """
        if golden.shape != candidate.shape or golden.dim() != 2:
            raise ValueError(f"{list(golden.shape)} against {list(candidate.shape)}")
        step = max(1, _PIECE // max(1, golden.shape[1]))
        for start in range(0, golden.shape[0], step):
            part = slice(start, start + step)
            given = None if labels is None else labels[part]
            self._piece(golden[part].double(), candidate[part].double(), given)

    def results(self) -> dict[str, float]:
        """Return the numbers by name; empty where nothing was fed.

        Without a label at any position there are no ``logp`` and no ``perplexity`` numbers.
        """
        if not self._positions:
            return {}
        kl = np.concatenate(self._kl)
        found = {
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            _AGREEMENT: self._same / self._positions,
            **self._top,
        }
        moved = np.concatenate(self._moved)
        if moved.size:
            found["logp_mean"] = float(np.abs(moved).mean())
            found["logp_max"] = float(np.abs(moved).max())
            with np.errstate(over="ignore"):
                found[_PERPLEXITY] = float(np.exp(-moved.mean()))
        error, size = self._squares
        found["nmse"] = error / size if size else (math.inf if error else 0.0)
        return found

    def _piece(
        self, golden: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor | None
    ) -> None:
        possible = (golden > -math.inf) & (candidate > -math.inf)
        if not bool(possible.any(1).all()):
            raise ValueError("a position where no token is left")
        golden, candidate = (each.masked_fill(~possible, -math.inf) for each in (golden, candidate))
        p, q = (each.log_softmax(1) for each in (golden, candidate))
        self._kl.append(divergence(p, q).numpy())
        moved = q - p
        best = golden.argmax(1)
        self._same += int((best == candidate.argmax(1)).sum())
        self._positions += golden.shape[0]
        labels = best if labels is None else labels
        # -1 stands for no label and is no index: what 0 gives in its place is not taken.
        there = possible.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1)
        known = torch.nonzero((labels >= 0) & there).flatten()
        self._moved.append(moved[known, labels[known]].numpy())
        # Minus infinity would leave NaN in every sum: zeros on both sides add nothing.
        plain, other = (each.masked_fill(~possible, 0.0) for each in (golden, candidate))
        error, size = self._squares
        self._squares = (
            error + float((other - plain).square().sum()),
            size + float(plain.square().sum()),
        )
        off = other - plain - _shift(plain, other, possible)
        # The shift was taken off the zeros as well, which are no errors.
        off.abs_().masked_fill_(~possible, 0.0)
        for name, count in TOP.items():
            if count is None or count >= golden.shape[1]:
                largest, scale = off.amax(1), plain.abs().amax(1)
            else:
                which = golden.topk(count, 1).indices
                largest, scale = off.gather(1, which).amax(1), plain.gather(1, which).abs().amax(1)
            each = (largest - _ABSOLUTE).clamp_min(0.0) / scale
            # A position of zeros on both sides is right.
            worst = float(torch.where(largest > _ABSOLUTE, each, 0.0).max())
            self._top[name] = max(self._top.get(name, 0.0), worst)


def _shift(golden: torch.Tensor, candidate: torch.Tensor, possible: torch.Tensor) -> torch.Tensor:
    """Return the intercept of each position's regression of candidate on golden, [position, 1].

    All are [position, vocabulary]; what is not possible is zero in both.
    """
    count = possible.sum(1, keepdim=True).double()
    mean, other = (each.sum(1, keepdim=True) / count for each in (golden, candidate))
    deviation = (golden - mean).masked_fill(~possible, 0.0)
    spread = deviation.square().sum(1, keepdim=True)
    # Equal logits have no slope: with 1 the shift is the difference of the means.
    slope = torch.where(spread > 0, (deviation * candidate).sum(1, keepdim=True) / spread, 1.0)
    return other - slope * mean
