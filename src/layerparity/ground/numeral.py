"""Write a number as a reader meets it, in whatever sentence, table or figure it stands."""

from __future__ import annotations

import math
import re


def numeral(value: float, digits: int = 3) -> str:
    """Write a number in few characters: ``0``, ``12``, ``0.0312``, ``4.1e-7``, ``NaN``, ``∞``.

    ``digits`` are those of a number that is neither whole nor written with an exponent.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if not 1e-3 <= abs(value) < 1e4:
        return power(value)
    # Of 1234.5 three digits would be 1.23e+03: a third way of writing.
    return f"{value:.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def signed(value: float) -> str:
    """Write a number with its sign, be it a plus: ``+0.5``."""
    return f"+{numeral(value)}" if value > 0 else numeral(value)


def power(value: float, digits: int = 1) -> str:
    """Write a finite number with an exponent of no more places than it needs: ``4.1e-7``."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def precise(value: float, digits: int = 8) -> str:
    """Write a number with so many digits that two which differ look different."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.{digits}g}")


def percent(fraction: float) -> str:
    """Return a fraction as a person reads it: 0.003 is ``0.3 %``."""
    return f"{numeral(100 * fraction)} %"
