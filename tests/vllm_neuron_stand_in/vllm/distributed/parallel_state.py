"""The ranks that share a model's tensors, over gloo."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed


@dataclass
class GroupCoordinator:
    """A group of ranks, and its collectives."""

    device_group: distributed.ProcessGroup
    rank_in_group: int
    world_size: int

    def all_gather(self, part: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the ranks' parts beside each other."""
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        distributed.all_gather(parts, part.contiguous(), group=self.device_group)
        return torch.cat(parts, dim)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Add the ranks' parts up, in place, and return them."""
        distributed.all_reduce(part, group=self.device_group)
        return part

    def reduce_scatter(self, part: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's slice of the sum."""
        return self.all_reduce(part.clone()).chunk(self.world_size, dim)[self.rank_in_group]


_groups: dict[str, GroupCoordinator] = {}


def get_tp_group() -> GroupCoordinator:
    """Return the ranks that share the model's tensors. Raises where they have not met."""
    assert "tp" in _groups, "the ranks have not met"
    return _groups["tp"]


def set_tp_group(group: GroupCoordinator) -> None:
    """Say who shares the model's tensors."""
    _groups["tp"] = group
