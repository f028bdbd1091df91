"""How queries or keys were turned, worked out from them before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.anatomy.block import ROTARY
from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.values import Values, best_factor, same


@dataclass(frozen=True)
class Turning:
    """Heads before and after they were turned: float64 [token, head, channel] on both sides.

    The golden turns the first ``dims`` channels in halves.
    """

    before: Values
    after: Values
    dims: int

    @property
    def still(self) -> bool:
        """Whether the golden turns nothing: its layer has no rotary embedding."""
        return self.after.is_golden(self.before.golden)

    @property
    def units(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The golden's and the candidate's turns: complex numbers of length 1 [token, pair]."""
        golden = _turn(self.before.golden, self.after.golden, self.dims, False)
        candidate = _turn(self.before.candidate, self.after.candidate, self.dims, False)
        return _unit(golden)[:, 0], _unit(candidate)[:, 0]

    def by(self, angles: torch.Tensor) -> bool:
        """Say whether ``angles`` [token, pair] and one length give the candidate's numbers."""
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        return self.after.shows(self._by_angles(turn, self.dims, False))

    def turns(self, dims: int, neighbours: bool = False) -> bool:
        """Say whether the candidate turned its first ``dims`` channels by any one angle a pair.

        All pairs may be longer by one factor, as YaRN makes them: what makes each token longer by
        its own, or each pair, is no angle.
        """
        before = self.before.candidate
        turn = _turn(before, self.after.candidate, dims, neighbours)
        return self.after.shows(self._by_angles(turn, dims, neighbours))

    @property
    def as_golden(self) -> bool:
        """Whether the golden's angles give the candidate's numbers: then only lengths are wrong."""
        turn = _turn(self.before.golden, self.after.golden, self.dims, False)
        return self.after.shows(self._by_angles(turn, self.dims, False))

    def _by_angles(self, turn: torch.Tensor, dims: int, neighbours: bool) -> torch.Tensor:
        """Return the candidate's heads, turned by the angles of ``turn`` and of its own length."""
        made = _turned(self.before.candidate, _unit(turn), dims, neighbours)
        factor = best_factor(made[..., :dims], self.after.candidate[..., :dims])
        return torch.cat([factor * made[..., :dims], made[..., dims:]], -1)


def turning_of(evidence: Evidence) -> Turning | None:
    """Return a failing rotation with its good input, where the golden is one by halves; or None."""
    if evidence.part != ROTARY or len(evidence.good) != 1:
        return None
    before, after = evidence.values(evidence.good[0]), evidence.values(evidence.local)
    if before is None or after is None or after.golden.dim() != 3:
        return None
    shape = after.golden.shape
    if before.golden.numel() != after.golden.numel():
        return None
    before = Values(before.golden.reshape(shape), before.candidate.reshape(shape), before.step)
    dims = evidence.fact("rotary_dim", shape[-1]) or shape[-1]
    golden = turned_as(before.golden, after.golden, dims, False)
    return Turning(before, after, dims) if after.is_golden(golden) else None


def turned_as(
    before: torch.Tensor, after: torch.Tensor, dims: int, neighbours: bool
) -> torch.Tensor:
    """Return heads [token, head, channel], turned by the angle a token and pair that fits best.

    All heads share it. A pair is two channels half of ``dims`` apart, or two ``neighbours``.
    """
    return _turned(before, _turn(before, after, dims, neighbours), dims, neighbours)


def _turn(before: torch.Tensor, after: torch.Tensor, dims: int, neighbours: bool) -> torch.Tensor:
    """Return the complex factor [token, 1, pair] that turns heads [token, head, channel] best."""
    pairs = [_pairs(each[..., :dims], neighbours) for each in (before, after)]
    return (pairs[0].conj() * pairs[1]).sum(1, True) / pairs[0].abs().square().sum(1, True)


def _unit(turn: torch.Tensor) -> torch.Tensor:
    """Return complex numbers, each of length 1."""
    return turn / turn.abs().clamp_min(1e-300)


def turned_by(before: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads [token, head, channel], turned in halves by ``angles`` [token, pair].

    What channels no pair is left for stay as they are.
    """
    dims = 2 * angles.shape[-1]
    return _turned(before, torch.polar(torch.ones_like(angles), angles).unsqueeze(1), dims, False)


def _turned(before: torch.Tensor, turn: torch.Tensor, dims: int, neighbours: bool) -> torch.Tensor:
    """Return heads [token, head, channel] whose pairs are multiplied by ``turn``, complex."""
    made = _pairs(before[..., :dims], neighbours) * turn
    parts = (made.real, made.imag)
    joined = torch.stack(parts, -1).flatten(-2) if neighbours else torch.cat(parts, -1)
    return torch.cat([joined, before[..., dims:]], -1)


def _pairs(values: torch.Tensor, neighbours: bool) -> torch.Tensor:
    if neighbours:
        return torch.complex(values[..., ::2].contiguous(), values[..., 1::2].contiguous())
    left, right = values.chunk(2, dim=-1)
    return torch.complex(left.contiguous(), right.contiguous())


def keeps_lengths(evidence: Evidence, dims: int) -> bool:
    """Say whether the candidate's pairs may be turned ones: each as long as it was, by one factor.

    Pairs are those of its first ``dims`` channels in halves. One token is enough; where its
    numbers are not at hand, they may be.
    """
    if len(evidence.good) != 1:
        return True
    before, after = evidence.values(evidence.good[0]), evidence.values(evidence.local)
    if before is None or after is None or after.golden.dim() != 3:
        return True
    if before.golden.numel() != after.golden.numel():
        return True
    was = _pairs(before.candidate.reshape(after.golden.shape)[..., :dims], False).abs()
    now = _pairs(after.candidate[..., :dims], False).abs()
    factor = best_factor(was, now)
    return factor > 0 and bool((now - factor * was).norm() <= 2 * after.limit * now.norm())


def same_angles(turning: Turning, rows: torch.Tensor) -> bool:
    """Say whether the candidate turned the tokens that bool [token] names as the golden did."""
    made = turned_as(turning.before.golden, turning.after.golden, turning.dims, False)
    right = turning.after
    return not bool(rows.any()) or same(right.candidate[rows], made[rows], right.limit)
