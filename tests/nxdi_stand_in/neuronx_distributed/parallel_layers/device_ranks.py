"""What the stand-in's device gives a graph: the number of the rank, and collectives.

Ranks are threads of one process. On a device these are instructions of the compiled graph; here
they are operations that `torch.export` keeps in it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

_here = threading.local()
# Longer than any graph of a test takes to come to the next collective.
_PATIENCE_S = 60


class Meeting:
    """Ranks that exchange one tensor each, as often as they want to.

    One computes at a time, in its ``turn``: torch does not promise that several threads may run one
    graph, and its operations of Python's, at once.
    """

    def __init__(self, count: int) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(count, timeout=_PATIENCE_S)
        self._parts: list[Any] = [None] * count

    def exchanged(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return what every rank brings, in the order of ranks."""
        self._parts[_here.rank] = part
        self._wait()
        parts = list(self._parts)
        self._wait()
        return parts

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()

    def give_up(self) -> None:
        """Let those that wait fail."""
        self._barrier.abort()


def run_ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what ``work`` returns on each rank; one that fails ends all."""
    meeting, results, errors = Meeting(count), [None] * count, []

    def rank_work(rank: int) -> None:
        _here.rank, _here.meeting = rank, meeting
        try:
            with meeting.turn, torch.no_grad():
                results[rank] = work(rank)
        except Exception as error:
            errors.append(error)
            meeting.give_up()

    threads = [threading.Thread(target=rank_work, args=(rank,)) for rank in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        where = traceback.extract_tb(errors[0].__traceback__)[-1]
        raise RuntimeError(
            f"a rank of the stand-in's device failed: {errors[0]!r} ({where})"
        ) from errors[0]
    return results


@torch.library.custom_op("nxd_stand_in::all_reduce", mutates_args=())
def all_reduce(part: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, in the order of ranks."""
    parts = _here.meeting.exchanged(part)
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    return total


@all_reduce.register_fake
def _(part: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(part)


@torch.library.custom_op("nxd_stand_in::all_gather", mutates_args=())
def all_gather(part: torch.Tensor, count: int) -> torch.Tensor:
    """Return the parts of ``count`` ranks, [rank, ...]."""
    return torch.stack(_here.meeting.exchanged(part))


@all_gather.register_fake
def _(part: torch.Tensor, count: int) -> torch.Tensor:
    return part.new_empty(count, *part.shape)


@torch.library.custom_op("nxd_stand_in::rank", mutates_args=())
def rank(beside: torch.Tensor) -> torch.Tensor:
    """Return the rank that runs the graph, int64 []; ``beside`` is any tensor."""
    return torch.tensor(_here.rank)


@rank.register_fake
def _(beside: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)
