"""Rows that are computed apart: what an operation is given, whatever a processor makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from layerparity.numbers.arithmetic import Mode
from layerparity.numbers.rows_apart import Apart

BATCH, TOKENS, WIDTH = 2, 3, 5
# [batch, token, channel]
VALUES = torch.arange(float(BATCH * TOKENS * WIDTH)).view(BATCH, TOKENS, WIDTH) / 10


class Given(Mode):
    """Note the tokens that each call of one function is given at a time."""

    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func, self.tokens = func, []

    def run(self, func: Any, args: Any, named: Any) -> Any:
        """Run one operation."""
        if func is self.func:
            self.tokens.append(args[0].shape[1])
        return func(*args, **named)


@pytest.mark.parametrize(
    ("func", "more"),
    [
        (torch.sum, (-1,)),
        (torch.mean, (-1,)),
        (torch.softmax, (-1,)),
        (functional.softmax, (-1,)),
        (functional.silu, ()),
        (torch.rsqrt, ()),
        (functional.linear, (torch.ones(4, WIDTH),)),
        (functional.rms_norm, ((WIDTH,),)),
    ],
)
def test_each_token_is_computed_by_itself(func: Any, more: tuple[Any, ...]) -> None:
    given = Given(func)
    with given, Apart():
        apart = func(VALUES, *more)
    assert given.tokens == [1] * TOKENS
    torch.testing.assert_close(apart, func(VALUES, *more))


@pytest.mark.parametrize(("func", "more"), [(torch.sum, (1,)), (torch.mul, (2.0,))])
def test_what_adds_tokens_or_never_rounds_otherwise_is_given_all(
    func: Any, more: tuple[Any, ...]
) -> None:
    given = Given(func)
    with given, Apart():
        func(VALUES, *more)
    assert given.tokens == [TOKENS]
