"""Where a run's time, reads and memory went, stage by stage."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

from layerparity.ground.decode import decode

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.02
# The parts of a stage's time in the order in which they pass, and what a person calls them.
PARTS = {
    "wait": "waiting for weights",
    "fingerprint": "fingerprint",
    "compute": "compute",
    "reference": "reference",
    "store": "store",
}


@dataclass
class Spent:
    """What filling a stage's weights took: seconds in reads, casts and hashes, and bytes read.

    The seconds are added up over the threads that read; where a stage is read ahead they pass
    while another one computes.
    """

    read: float = 0.0
    convert: float = 0.0
    hash: float = 0.0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds of all threads, added up."""
        return self.read + self.convert + self.hash

    @property
    def rate(self) -> float:
        """Return how fast a thread read, in bytes per second; 0 where nothing was read."""
        return self.bytes / self.read if self.read else 0.0

    def __iadd__(self, other: Spent) -> Spent:
        self.read += other.read
        self.convert += other.convert
        self.hash += other.hash
        self.bytes += other.bytes
        return self


@dataclass
class StageProfile:
    """One stage of a run, in seconds and bytes.

    ``wait`` is the time the run stood still for its weights, ``fingerprint`` what the prints of the
    weights took, ``compute`` the stage itself, ``reference`` what was computed beside it, ``store``
    the writing of its tensors. ``peak`` is the most anonymous memory the process held meanwhile.
    """

    wait: float = 0.0
    fingerprint: float = 0.0
    compute: float = 0.0
    reference: float = 0.0
    store: float = 0.0
    peak: int = 0
    loading: Spent = field(default_factory=Spent)

    @property
    def seconds(self) -> float:
        """Return how long the stage held the run up, in all."""
        return self.wait + self.fingerprint + self.compute + self.reference + self.store

    def __iadd__(self, other: StageProfile) -> StageProfile:
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(other, part))
        self.loading += other.loading
        self.peak = max(self.peak, other.peak)
        return self

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the time that passes inside to ``what``."""
        began = perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + perf_counter() - began)


@dataclass
class RunProfile:
    """A run's stages in running order, and the bytes of anonymous memory it held before the first.

    Raises ValueError on construction where a number is negative or not finite.
    """

    before: int = 0
    stages: dict[str, StageProfile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers: list[float] = [self.before]
        for each in self.stages.values():
            numbers += [each.peak, *(getattr(each, part) for part in PARTS)]
            numbers += vars(each.loading).values()
        if min(numbers) < 0 or not all(map(math.isfinite, numbers)):
            raise ValueError("a number is missing or negative")

    @property
    def total(self) -> StageProfile:
        """Return the stages added up; ``peak`` is the most memory held above ``before``."""
        total = StageProfile()
        for each in self.stages.values():
            total += each
        total.peak = max(total.peak - self.before, 0)
        return total

    @classmethod
    def from_dict(cls, raw: object) -> RunProfile:
        """Read what `dataclasses.asdict` gave. Raises ValueError where it is damaged."""
        profile: RunProfile = decode(cls, raw)
        if asdict(profile) != raw:
            raise ValueError("a number is missing or negative")
        return profile


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process: what no file stands behind."""
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.exists() else []
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    import psutil

    # Elsewhere than on Linux nothing tells the two apart.
    return int(psutil.Process(os.getpid()).memory_info().rss)


class MemoryPeaks:
    """Watches the process's anonymous memory; `take` returns the most since it was last asked."""

    def __init__(self) -> None:
        self._peak = 0
        self._stop = threading.Event()

        def watch() -> None:
            while not self._stop.wait(_INTERVAL):
                self._peak = max(self._peak, anonymous_bytes())

        self._thread = threading.Thread(target=watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryPeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> int:
        """Return the most bytes held since the last call, and begin again."""
        peak, self._peak = max(self._peak, anonymous_bytes()), 0
        return peak
