"""One factor a token: what a norm, a softmax or a scale leaves that was computed too coarsely.

All numbers of a token, or of a token's head, are then off by one factor, each token by another:
their slopes on the reference cancel over tokens, and their squares do not. Rounding of the numbers
themselves leaves such factors too, but as a share of its error it is small: about one part in as
many as a token has independent numbers. Errors and references are weighed by `scales` throughout.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from layerparity.numbers.typical_floor import degrees_of_freedom

_TINY = 1e-300
# No token is believed to be worth more independent numbers than this, nor more than there are
# tokens to tell it from.
_MOST_FREEDOM = 64
# Factors of fewer tokens than this are off by chance.
FEW = 8
# Sums of one tensor's squares in another order are no further apart.
_ROUNDING = 1e-9


def explained(
    products: torch.Tensor, squares: torch.Tensor, dim: int | tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return how much squared error one factor for each row explains, summed over ``dim`` or all.

    ``products`` and ``squares`` are float64 [...]: each row's sums of error * reference and of
    reference^2. The least squares of one factor take ``products^2 / squares`` off a row. The result
    is float64.
    """
    return (products.square() / squares.clamp_min(_TINY)).sum(dim)


def factor_ratio(of_candidate: float, error: float, share: float, floor: float) -> float:
    """Return the tokens' factors over those that clean ways of the same error show.

    ``of_candidate`` is what factors explain of the candidate's squared ``error``, ``share`` the
    largest part of a clean way's error that they explain. An error below the ``floor`` is judged
    as one that is as large: what is more exact than the floor is nobody's mistake.
    """
    usual = share * max(error, floor)
    if usual > 0:
        return math.sqrt(of_candidate / usual)
    return math.inf if of_candidate > 0 else 0.0


def ways_apart(tokens: torch.Tensor) -> int:
    """Return how many ways differ, by their squared errors: float64 [way, token].

    Ways that are off by the same at most tokens are one: to agree to the bit is more than two
    computations of one thing owe each other, if a processor rounds a vector's remainder otherwise.
    """
    found: list[torch.Tensor] = []
    for way in tokens:
        alike = (torch.isclose(way, each, rtol=_ROUNDING, atol=0.0) for each in found)
        if not any(2 * int(same.sum()) > same.numel() for same in alike):
            found.append(way)
    return len(found)


def freedom_among(ways: torch.Tensor) -> float | None:
    """Return the degrees of freedom of the ways' errors over the others', the least of any way.

    ``ways`` are squared errors, float64 [way, token]. None where they say nothing of it.
    """
    least, errors = math.inf, ways.numpy()
    for index, way in enumerate(errors):
        # As a candidate is: over the largest of the others, of which a single way has none.
        others = np.delete(errors, index, axis=0).max(axis=0, initial=0.0)
        seen = others > 0
        least = min(least, degrees_of_freedom(way[seen] / others[seen]))
    return None if math.isinf(least) else least


def standing_out(
    errors: torch.Tensor, floors: torch.Tensor, ways: int, among: float = math.inf
) -> tuple[int, float, float]:
    """Return the token whose error stands out most, its error over its floor, and how far in z.

    ``errors`` and ``floors`` are squared, float64 [token]; the floors are of so many different
    ``ways``. The candidate's other tokens say how far its errors scatter about the floors, and
    ``among``, as `freedom_among` gives it, how far the ways' do: what a candidate computes just as
    one way does scatters little. A floor scatters as well: where a token has few independent
    numbers, it may be small by luck, and the token be right. So the ratio is that of two
    chi-squared numbers, and its cube root is judged by both (Paulson 1942): with
    ``a = 2 / (9 df)`` of the error and ``b`` of the floor,
    ``((1 - b) x - (1 - a)) / sqrt(b x^2 + a)``.
    """
    seen = torch.nonzero(floors > 0).flatten()
    ratio = errors[seen] / floors[seen]
    # The median, since the token that stands out would raise a mean.
    common = float(ratio.median()) if ratio.numel() else 0.0
    if common <= 0:
        return 0, 0.0, 0.0
    freedom = min(degrees_of_freedom(ratio), among)
    most = min(_MOST_FREEDOM, ratio.numel())
    # Variances add up, and 2 / (9 df) is one: so do the inverses of degrees of freedom.
    freedom = most if math.isinf(freedom) else freedom * most / (freedom + most)
    # The ratios scatter by both.
    a = 2 / (9 * freedom * (1 + 1 / ways))
    # A floor is of so many ways: it is worth as many times the numbers of one error.
    b = a / ways
    worst = int(ratio.argmax())
    # The median is where z is 0.
    x = (float(ratio[worst]) / common) ** (1 / 3) * (1 - a) / (1 - b)
    z = ((1 - b) * x - (1 - a)) / math.sqrt(b * x * x + a)
    return int(seen[worst]), math.sqrt(float(ratio[worst])), z
