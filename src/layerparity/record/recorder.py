"""Recorder: write a run's tensors, one whole file a stage, while the next stages compute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Site, SiteSpec
from layerparity.ground.files import tensor_digest
from layerparity.record.folder import RunFolder, stage_file
from layerparity.record.manifest import Record

if TYPE_CHECKING:
    import torch


# A sync can take longer than a small stage: what a few stages keep may wait for it together.
WAITING = 64 << 20


class Recorder:
    """Writes each stage's tensors under ``folder/tensors`` and keeps only their records.

    Files are written and synced while the next stages compute, and appear only when they are whole.
    What waits to be written is at most one stage's tensors, or `WAITING` bytes of several.
    `finish` waits for the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._files = RunFolder(folder)
        self.records: list[Record] = []
        self._background = ThreadPoolExecutor(1, "recorder")
        self._writing: deque[tuple[int, Future[None]]] = deque()
        self._broken = False

    def write(
        self, name: str, tensors: Mapping[Site, torch.Tensor], specs: Mapping[Site, SiteSpec]
    ) -> list[Record]:
        """Store the tensors of one stage under its name, or ``decode.N``; return their records.

        Tensors are on the CPU, of any dtype, in the axes of their spec, such as [batch, token,
        channel]. Raises UserError where the disk refused what was written before.
        """
        if not tensors:
            return []
        relative = stage_file(name)
        named = {str(site): tensor for site, tensor in tensors.items()}
        self.then(named, partial(self._files.write_tensors, relative))
        fresh = [
            Record(
                site=site,
                axes=specs[site].axes,
                kind=specs[site].kind,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                file=relative,
                digest=tensor_digest(tensor),
                stats=statistics(tensor),
            )
            for site, tensor in tensors.items()
        ]
        self.records += fresh
        return fresh

    def then(
        self,
        tensors: Mapping[str, torch.Tensor],
        work: Callable[[dict[str, torch.Tensor]], object],
    ) -> None:
        """Hand copies of tensors to ``work`` once all that was handed over before is on the disk.

        Raises UserError where the disk refused what was written before.
        """
        import torch

        size = sum(tensor.nbytes for tensor in tensors.values())
        self._wait(WAITING - size)
        # A copy: what was handed over may be the next stage's input, or a buffer used again.
        copies = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }

        def unless_broken() -> None:
            # What comes after a file that could not be written must not vouch for it.
            if not self._broken:
                self._broken = True
                work(copies)
                self._broken = False

        self._writing.append((size, self._background.submit(unless_broken)))

    def finish(self) -> None:
        """Wait until everything is on the disk. Raises UserError where it refuses."""
        self._wait(-1)

    def stop(self) -> None:
        """Wait until nothing is being written, for a run that has failed already."""
        wait([writing for _, writing in self._writing])
        self._writing.clear()

    def _wait(self, allowed: int) -> None:
        """Wait, the oldest first, until at most so many bytes are still to be written."""
        while self._writing:
            _, oldest = self._writing[0]
            # What is done is looked at early: a full disk need not wait for the end of the run.
            if not oldest.done() and sum(size for size, _ in self._writing) <= allowed:
                return
            self._writing.popleft()
            oldest.result()


# Values that are float64 at one time: they stay in a core's cache.
CHUNK = 1 << 16


def statistics(tensor: torch.Tensor) -> dict[str, float]:
    """Return mean, std (population), min, max, l2, rms and the counts of NaN and Inf.

    ``tensor`` is of any shape and dtype. Moments cover the finite elements, accumulated in float64
    a chunk at a time, so that nothing of the tensor's size is allocated; an empty tensor, or one
    without a finite element, has zeros.
    """
    from layerparity.numbers.arithmetic import one_thread

    flat = tensor.detach().reshape(-1)
    tally = _Tally()
    with one_thread():
        for chunk in flat.split(CHUNK) if flat.numel() else ():
            tally.add(chunk)
    return tally.statistics()


class _Tally:
    """Sums over chunks, in float64."""

    def __init__(self) -> None:
        self.count, self.total, self.square = 0, 0.0, 0.0
        self.low, self.high = float("inf"), float("-inf")
        self.nan = self.inf = 0

    def add(self, chunk: torch.Tensor) -> None:
        import torch

        values = chunk.to(torch.float64)
        total = float(values.sum())
        # A finite sum has finite terms; one that is not may still have them, in float64.
        if not math.isfinite(total):
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())
            values = values[values.isfinite()]
            total = float(values.sum())
        if values.numel():
            self.count += values.numel()
            self.total += total
            self.square += float(values.dot(values))
            low, high = values.aminmax()
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def statistics(self) -> dict[str, float]:
        count = self.count
        mean = self.total / count if count else 0.0
        variance = max(self.square / count - mean * mean, 0.0) if count else 0.0
        return {
            "mean": mean,
            "std": variance**0.5,
            "min": self.low if count else 0.0,
            "max": self.high if count else 0.0,
            "l2": self.square**0.5,
            "rms": (self.square / count) ** 0.5 if count else 0.0,
            "nan": float(self.nan),
            "inf": float(self.inf),
        }
