"""Profile: a run's time, reads and memory by stage, as metrics and as one line."""

from __future__ import annotations

from collections.abc import Iterator

from layerparity.console import bytes_text
from layerparity.profile import PARTS, RunProfile, StageProfile
from layerparity.site import Site

_MB = 1e6
_BLOCK = "block"
# A part that takes less goes without saying.
_LEAST = 0.005


def metrics(profile: RunProfile) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of every stage; a block's step is its layer."""
    for (where, step), each in _by_place(profile).items():
        yield f"time/{where} ms", each.seconds * 1000, step
        if where != _BLOCK:
            continue
        parts = {
            "wait for weights": each.wait,
            "read": each.loading.read,
            "convert": each.loading.convert,
            "hash": each.loading.hash,
            "fingerprint": each.fingerprint,
            "compute": each.compute,
            "reference": each.reference,
            "store": each.store,
        }
        for name, seconds in parts.items():
            yield f"profile/{name} ms", seconds * 1000, step
        yield "profile/read MB", each.loading.bytes / _MB, step
        yield "profile/memory peak MB", each.peak / _MB, step
    yield "summary/read MB", sum(each.loading.bytes for each in profile.stages.values()) / _MB, 0
    peak = max(each.peak for each in profile.stages.values())
    yield "summary/memory peak MB", (peak - profile.before) / _MB, 0


def _by_place(profile: RunProfile) -> dict[tuple[str, int], StageProfile]:
    """Return the stages by series and step, what was run of one block added up."""
    places: dict[tuple[str, int], StageProfile] = {}
    for index, (stage, each) in enumerate(profile.stages.items()):
        layer = Site(stage, "in").layer
        place = (stage, index) if layer is None else (_BLOCK, layer)
        places.setdefault(place, StageProfile())
        places[place] += each
    return places


def line(profile: RunProfile) -> str:
    """Return where the time went, the largest part first, what was read, and the memory held."""
    total = profile.total
    whole = total.seconds or 1.0
    shares = {words: getattr(total, part) / whole for part, words in PARTS.items()}
    largest = sorted(shares.items(), key=lambda each: -each[1])
    parts = [f"{100 * share:.0f} % {words}" for words, share in largest if share >= _LEAST]
    said = [f"time: {', '.join(parts)}"]
    if total.loading.rate:
        rate = bytes_text(total.loading.rate)
        said.append(f"{bytes_text(total.loading.bytes)} read at {rate}/s")
    return "; ".join([*said, f"{bytes_text(total.peak)} of memory at most"])
