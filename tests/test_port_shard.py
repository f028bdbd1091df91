"""What one rank computes of a module: the shares add up to the whole, and none is counted twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from layerparity.ports.observed.shard import added, among, by_columns, by_rows, expert_shares

EXPERTS, HIDDEN, INNER = 6, 5, 7


def test_each_expert_is_of_one_group_alone() -> None:
    chosen = torch.tensor([[0, 2], [1, 3], [2, 5], [4, 5]])
    weights = torch.rand(4, 2) + 1
    shares = [among((chosen, weights), first, 2) for first in (0, 2, 4)]
    assert all(bool(((own >= 0) & (own < 2)).all()) for own, _ in shares)
    assert torch.equal(sum(weight for _, weight in shares), weights)
    assert sum(int(weight.count_nonzero()) for _, weight in shares) == weights.numel()
    assert shares[1][0].tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    # Where a group has all that were chosen, their weights are the router's own.
    assert among((chosen, weights), 0, EXPERTS)[1] is weights


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_in_parts_is_the_projection(bias: bool) -> None:
    torch.manual_seed(0)
    module, given = nn.Linear(6, 8, bias=bias).double(), torch.randn(2, 3, 6).double()
    rows = by_rows(module, ((0, 3), (3, 3), (3, 8)))(given)
    torch.testing.assert_close(rows, module(given))
    columns = by_columns(module, ((0, 2), (2, 6), (6, 6)))(given)
    torch.testing.assert_close(columns, module(given))


def test_a_sum_is_rounded_after_each_rank() -> None:
    parts = [torch.tensor(1.0, dtype=torch.bfloat16), *[torch.tensor(2.0**-9).bfloat16()] * 2]
    assert added(iter(parts)).item() == 1.0, "two halves of a step are lost one by one"


class Experts(nn.Module):
    """Experts as transformers stacks them, all of them weighed alike."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN).double())
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER).double())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->eti", given, self.gate_up_proj).chunk(2, -1)
        inner = nn.functional.silu(gate) * up
        return torch.einsum("eti,ehi->th", inner, self.down_proj)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_shares_of_experts_add_up(ranks: int) -> None:
    torch.manual_seed(0)
    whole, given = Experts(), torch.randn(4, HIDDEN).double()
    alone = copy.deepcopy(whole)
    groups = [list(expert_shares(whole, {}, first, 3, ranks)) for first in (0, 3)]
    assert {share.num_experts for group in groups for share in group} == {3}
    total = sum(share(given) for group in groups for share in group)
    torch.testing.assert_close(total, alone(given))
