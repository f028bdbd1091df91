"""Which angles a rotation has: its base, its scaling, or none at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from layerparity.ground.numeral import numeral
from layerparity.mistakes.turning import Turning

# Ratios that are apart by less are one.
_ALIKE = 1e-3
# The step of a type in which the angles of slow pairs are no rounding alone.
_FINE = 1e-5


def which_angles(turning: Turning, positions: Sequence[int], facts: Mapping[str, str]) -> str:
    """Return what the candidate's angles are, where that gives its numbers; or nothing.

    ``positions`` are those of the tokens. Angles are position times a rate a pair:
    rate = theta^(-2 pair / dims) (Su et al., RoFormer, 2021), scaled or not.
    """
    at = torch.tensor(positions, dtype=torch.float64)
    golden, own = turning.units
    if len(at) != len(own) or len(at.unique()) < 2:
        return ""
    if turning.by(torch.zeros_like(own.real)):
        return "nothing is turned, or by position 0 alone"
    was, is_now = _rates(golden, at), _rates(own, at)
    if was is None or is_now is None or not turning.by(at[:, None] * is_now):
        return ""
    factor = float((was * is_now).sum() / (was * was).sum())
    if turning.by(at[:, None] * factor * was):
        if abs(factor + 1) < _ALIKE:
            return "pairs are turned the other way round: the sine's sign"
        words = f"every angle is {numeral(factor, 4)} times the golden's"
        return f"{words}, as positions are by a linear scaling"
    found = _base(turning, at, (was, is_now), facts)
    return found or (_by_range(is_now / was) if turning.after.step < _FINE else "")


def _rates(units: torch.Tensor, at: torch.Tensor) -> torch.Tensor | None:
    """Return the angle a position of each pair, in radians, from complex units [token, pair].

    None where no token follows on another.
    """
    next_one = at[1:] - at[:-1] == 1
    if not bool(next_one.any()):
        return None
    rough = (units[1:] * units[:-1].conj())[next_one].sum(0).angle()
    left = (units * torch.polar(torch.ones_like(units.real), -at[:, None] * rough)).angle()
    return rough + (at[:, None] * left).sum(0) / at.square().sum()


def _base(
    turning: Turning,
    at: torch.Tensor,
    rates: tuple[torch.Tensor, torch.Tensor],
    facts: Mapping[str, str],
) -> str:
    """Return the base that the candidate's rates alone are made of; or nothing.

    ``rates`` [pair] are the golden's and the candidate's. A model may have several bases, one for
    each kind of block: the golden's is what its own rates are made of, if they are of one.
    """
    powers = torch.arange(len(rates[1]), dtype=torch.float64) / len(rates[1])
    if not bool((rates[1] > 0).all()):
        return ""
    theta = _fitted(rates[1], powers)
    # A number that was typed, where it gives the same.
    typed = (float(f"{theta:.{digits}g}") for digits in range(1, 6))
    base = next((each for each in typed if turning.by(at[:, None] * each**-powers)), None)
    if base is None:
        return ""
    golden = _fitted(rates[0].abs(), powers)
    if not bool(((golden**-powers / rates[0] - 1).abs() < _ALIKE).all()):
        return f"rope_theta = {base:g} alone makes the angles"
    words = f"rope_theta is {base:g}, where the golden's is {float(f'{golden:.4g}'):g}"
    head = facts.get("head_dim", "")
    if head.isdigit() and int(head) not in (0, turning.dims):
        over = golden ** (turning.dims / int(head))
        if abs(over / base - 1) < _ALIKE:
            words += f" (the same as exponents over head_dim, {head}, in place of {turning.dims})"
    return words


def _fitted(rates: torch.Tensor, powers: torch.Tensor) -> float:
    """Return the base whose negative powers are nearest to positive rates, both [pair]."""
    return float((-(powers * rates.log()).sum() / powers.square().sum()).exp())


def _by_range(ratios: torch.Tensor) -> str:
    """Return that the slow pairs alone are slower or faster; or nothing."""
    falls = bool((ratios.diff() <= _ALIKE).all()) or bool((ratios.diff() >= -_ALIKE).all())
    slow = float(ratios[-1])
    if not falls or abs(float(ratios[0]) - 1) > _ALIKE or abs(slow - 1) <= _ALIKE:
        return ""
    return (
        f"the fast pairs turn as the golden's, the slowest {numeral(slow, 4)} times as fast, "
        "as by a rope scaling by ranges (llama3, YaRN, longrope) that the golden has not, "
        "or has with other numbers"
    )
