"""Profile: a run's time, reads and memory by stage, as a file and as metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from layerparity.profile import StageProfile

_MB = 1e6


def text(profile: Mapping[str, StageProfile]) -> str:
    """Return the profile as JSON: seconds and bytes by stage, in running order."""
    return json.dumps({stage: each.to_dict() for stage, each in profile.items()}, indent=1)


def metrics(profile: Mapping[str, StageProfile]) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of every stage; a block's step is its layer."""
    for index, (stage, each) in enumerate(profile.items()):
        tail = stage.removeprefix("layers.").split(".")[0]
        where, step = ("block", int(tail)) if tail.isdigit() else (stage, index)
        yield f"time/{where} ms", each.seconds * 1000, step
        if not tail.isdigit():
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
    yield "summary/read MB", sum(each.loading.bytes for each in profile.values()) / _MB, 0
    yield "summary/memory peak MB", max(each.peak for each in profile.values()) / _MB, 0
