"""Portrait: what a report shows of the guilty place beside its metrics, in numbers of bounded size.

Gathered once, from the tensors of one site and of the same site in the other blocks. Nothing here
is worded: `report/closeup.py` does that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

FLOOR, GOLDEN = "floor", "golden"
# Upper edges of the bins of an error histogram, in units of the last place: 0, then powers of two.
ULP_EDGES = (0.0, *(2.0**power for power in range(-3, 25)))


@dataclass(frozen=True)
class Grouped:
    """One figure for each group (head, channel, expert) of a site, in every block that has one.

    ``size`` is how many groups stand for one value, which is the largest of theirs, and ``count``
    how many groups there are. ``values`` is by site text.
    """

    size: int
    count: int
    values: dict[str, list[float]]


@dataclass(frozen=True)
class Element:
    """One number of the guilty site that is far off.

    ``sequence`` is the row of the batch, ``token`` the place in it, ``channel`` the place in the
    token, or in its ``head`` where there are several. ``reference`` is None where there is none.
    ``error`` is the distance from the reference (from the golden, where there is none) in noise
    floors, else absolute.
    """

    sequence: int
    token: int
    channel: int
    golden: float
    candidate: float
    reference: float | None
    error: float
    head: int | None = None


class InsteadKind(StrEnum):
    """What is shown of a place where no site of real numbers fails."""

    # The site that shows the fault holds no real numbers: one computed from it, or none is off.
    FOLLOWING = "following"
    NOTHING_OFF = "nothing_off"
    # Weights are wrong and no site fails: the largest error there, or there is none to show.
    LARGEST_ERROR = "largest_error"
    NO_ERROR = "no_error"


@dataclass(frozen=True)
class Instead:
    """Why another site is shown than one that fails.

    ``place`` is the site that shows the fault, or the module whose weights are wrong.
    """

    kind: InsteadKind
    place: str


@dataclass(frozen=True)
class Portrait:
    """The guilty site in detail; ``unit`` is what its errors are in units of, `FLOOR` or `GOLDEN`.

    ``groups`` gives by grouping the error in that unit. ``ulp`` counts by side the elements in each
    bin of `ULP_EDGES`, and the rest in one more. ``quantiles`` holds those of the normalised error
    by side, beside those of the ``normal`` distribution. ``load`` gives by site and side how many
    real tokens each expert got, and ``local_floors`` the local noise floor (relative L2) of block
    outputs whose rows have another one, since the candidate is chained. ``instead`` says why the
    site is not the one that shows the fault, or why nothing is shown of it.
    """

    site: str
    unit: str
    groups: dict[str, Grouped] = field(default_factory=dict)
    ulp: dict[str, list[int]] = field(default_factory=dict)
    ulp_dtype: str = ""
    quantiles: dict[str, list[float]] = field(default_factory=dict)
    worst: tuple[Element, ...] = ()
    load: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    local_floors: dict[str, float] = field(default_factory=dict)
    instead: Instead | None = None
