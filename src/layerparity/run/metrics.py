"""The metrics that a run logs: its sites by layer, where its time and memory went, its sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Site
from layerparity.ground.profile import RunProfile, StageProfile

if TYPE_CHECKING:
    from layerparity.record.manifest import Manifest
    from layerparity.run.pass_result import PassResult

_MB = 1e6
_BLOCK = "block"


def run_metrics(
    made: Manifest, result: PassResult, seconds: float
) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of a finished run; ``seconds`` are those of its stages."""
    for record in made.records:
        layer = record.site.layer
        if layer is None or record.site.phase != "prefill":
            continue
        label = (record.site.component or "block") + f".{record.site.end}"
        yield f"layer/{label} rms", record.stats["rms"], layer
        largest = max(abs(record.stats["min"]), abs(record.stats["max"]))
        yield f"layer/{label} max abs", largest, layer
    yield from profile_metrics(result.profile)
    broken = sum(r.stats["nan"] + r.stats["inf"] for r in made.records)
    yield "summary/sites", float(len(made.records)), 0
    yield "summary/nan and inf", broken, 0
    yield "summary/seconds", seconds, 0


def profile_metrics(profile: RunProfile) -> Iterator[tuple[str, float, int]]:
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
