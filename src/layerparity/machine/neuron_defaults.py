"""Hold the versions of AWS's SDK at which a default that changes numbers changed.

Two runs with other defaults differ although nobody changed a word of either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COMPILER = "neuronx-cc"
# The newest release that this list was made with: SDK 2.33 ships neuronx-cc 2.28.7631.
NEWEST_KNOWN = (2, 28)
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
# The SDK that a compiler came with, by AWS's lists of packages ("Release Content"): 2.25.0 has
# 2.20.9961, 2.26.1 2.21.33363, 2.27.1 2.22.12471, 2.28.0 2.23.6484, 2.29.0 2.24.5133, 2.30.0
# 2.25.3371, 2.31.0 2.26.6360, 2.33.0 2.28.7631.
_SDK_AHEAD = 5
_COUNTED_SINCE = (2, 20)


@dataclass(frozen=True)
class DefaultChange:
    """A default of the compiler: the first version that has it, what it is, and was.

    ``as_before`` is the option that asks for the former one, ``as_now`` for the later one.
    """

    since: tuple[int, int]
    sdk: str
    what: str
    as_before: str
    as_now: str


# "Neuron Compiler release notes", AWS Neuron SDK 2.27.0. (The component's own page heads that entry
# 2.15.54.0; the release's list of packages has 2.22.)
CHANGES = (
    DefaultChange(
        (2, 22),
        "2.27",
        "--auto-cast is none, was matmul",
        "--auto-cast=matmul",
        "--auto-cast=none",
    ),
    DefaultChange(
        (2, 22),
        "2.27",
        "mixed-precision accumulation is on, was off",
        "--disable-mixed-precision-accumulation",
        "--enable-mixed-precision-accumulation",
    ),
)


def numbers(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, or None where it has none."""
    found = _NUMBERS.match(version)
    return (int(found[1]), int(found[2])) if found else None


def sdk_of(compiler: str) -> str:
    """Return the SDK release that a version of neuronx-cc came with; empty where unknown."""
    release = numbers(compiler)
    if release is None or not _COUNTED_SINCE <= release <= NEWEST_KNOWN:
        return ""
    return f"{release[0]}.{release[1] + _SDK_AHEAD}"


def changed_between(one: str, other: str) -> list[DefaultChange]:
    """Return the defaults that differ between two versions of neuronx-cc, whichever is older."""
    releases = [release for each in (one, other) if (release := numbers(each)) is not None]
    if len(releases) < 2:
        return []
    return [change for change in CHANGES if min(releases) < change.since <= max(releases)]
