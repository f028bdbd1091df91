"""A rank that does, where it is told to, what ranks do when things go wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import PartKind, RankShare
from layerparity.ports.base import Call
from layerparity.ports.ranks.side import RankObserved, RankSide


class Side(RankSide):
    """Rank 1 of several obeys the stage's name; the others wait for it, as in a collective."""

    @classmethod
    def prepare(cls, keys: Any) -> None:
        """Refuse if told to."""
        if keys.get("prepare"):
            raise UserError(keys["prepare"], "and this is the cure.")

    def __init__(self, assets: Any, prepare: str = "", other: str = "") -> None:
        super().__init__(assets)
        self.other = other

    def libraries(self) -> dict[str, str]:
        """Return what is here, but for the torch of the last rank, which is ``other``."""
        mine = super().libraries()
        if self.other and self.assets.rank == self.assets.count - 1:
            mine["torch"] = self.other
        return mine

    def start(self) -> dict[str, str]:
        """Return who this is."""
        return {"process": str(os.getpid()), "rank": str(self.assets.rank)}

    def place(self, stages: Sequence[str]) -> int:
        """Take as many bytes as there are stages."""
        return len(stages)

    def load(self, stage: str) -> dict[str, str]:
        """Do what the stage's name says, on rank 1."""
        if self.assets.rank != 1:
            time.sleep(0.0 if stage in ("refuse", "fine") else 600.0)
        if stage == "raise":
            raise ValueError("rank 1 cannot do this")
        if stage == "refuse":
            raise UserError("rank 1 refuses", "ask another.")
        if stage == "die":
            print("out of luck", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return {f"{stage}.weight": "digest"}

    def begin(self, call: Call) -> None:
        """Do nothing."""

    def run(self, stage: str, given: torch.Tensor) -> RankObserved:
        """Return the rank's half of what is given, [batch, token, channel], doubled."""
        half = given.shape[-1] // self.assets.count
        index = range(self.assets.rank * half, (self.assets.rank + 1) * half)
        return RankObserved(
            given[..., list(index)] * 2,
            RankShare(PartKind.SHARDED, 2, tuple(index)),
            unseen={"x": "y"},
        )

    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Refuse."""
        raise UserError("no cache here", "use none.")
