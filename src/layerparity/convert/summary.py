"""Summary: what was made of which tensors, counted by kind, and kept in the result's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerparity.convert.policy import Why
from layerparity.convert.resume import State, origin
from layerparity.convert.shards import Shard, Tensor

_CHANGES = (Why.DEQUANTISED, Why.ROUNDED, Why.WIDENED)


@dataclass(frozen=True)
class Group:
    """Tensors with which the same was done: how many, and their bytes before and after."""

    stored: str
    written: str
    why: Why
    tensors: int
    bytes_stored: int
    bytes_written: int

    @property
    def changes(self) -> bool:
        """Say whether these tensors are converted at all."""
        return self.why in _CHANGES


def groups(shards: Iterable[Shard]) -> list[Group]:
    """Return what is done with the tensors, the most bytes first."""
    held: dict[tuple[str, str, Why], list[Tensor]] = {}
    for shard in shards:
        for each in shard.tensors:
            held.setdefault((each.stored.dtype, each.dtype, each.why), []).append(each)
    found = [
        Group(
            *key,
            len(some),
            sum(each.source_bytes for each in some),
            sum(each.bytes for each in some),
        )
        for key, some in held.items()
    ]
    return sorted(found, key=lambda group: -group.bytes_written)


def report(shards: Sequence[Shard], state: State) -> str:
    """Return JSON of the groups, of every tensor that was not copied, and of the origin."""
    return json.dumps(
        {
            "groups": [asdict(group) for group in groups(shards)],
            "tensors": dict(_tensors(shards)),
            "origin": origin(state),
        },
        indent=1,
    )


def _tensors(shards: Iterable[Shard]) -> Iterator[tuple[str, dict[str, Any]]]:
    for shard in shards:
        for each in shard.tensors:
            if each.why is not Why.AS_STORED:
                yield each.name, {"from": each.stored.dtype, "to": each.dtype, "why": each.why}
