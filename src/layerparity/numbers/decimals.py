"""Numbers to a few decimal digits, as a file keeps them that holds one for each token or group."""

from __future__ import annotations

import numpy as np

# Powers of ten up to this one are exact, and so a whole number times or over one of them is the
# decimal's nearest float.
_EXACT = 22
_POWERS = 10.0 ** np.arange(_EXACT + 1)


def shortened(values: np.ndarray, digits: int) -> list[float]:
    """Return float64 [n] rounded to so many digits: the floats that such decimals are read as."""
    # The logarithms of 0, NaN and Inf give no number of places: these are told apart below.
    with np.errstate(all="ignore"):
        places = digits - 1 - np.floor(np.log10(np.abs(values)))
    usual = np.abs(places) <= _EXACT
    shift = np.where(usual, places, 0).astype(np.int64)
    up, down = _POWERS[np.maximum(shift, 0)], _POWERS[np.maximum(-shift, 0)]
    # One of both powers is 1: the other one alone scales a value, and is exact.
    short = np.round(values * up / down) / up * down
    for odd in np.flatnonzero(~usual & (values != 0)):
        short[odd] = float(f"{values[odd]:.{digits}g}")
    numbers: list[float] = short.tolist()
    return numbers
