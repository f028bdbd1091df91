"""Keys: numbers are held against the bounds of their key, and keys against each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from layerparity.ground.errors import UserError
from layerparity.settings.config import Config, checked
from layerparity.settings.key import check_numbers, key


@dataclass
class Inner:
    share: float = key(0.5, "a share", least=0, most=1)


@dataclass
class Limits:
    limit: float = key(1.0, "a limit", above=0)
    count: int = key(1, "a count", least=1)
    some: list[float] = key([], "several", most=4)
    inner: Inner = field(default_factory=Inner)
    is_on: bool = key(False, "no number", least=1)


def refusal(settings: Limits) -> str:
    with pytest.raises(UserError) as caught:
        check_numbers(settings)
    return str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_no_limit(value: float) -> None:
    """Nothing is ever above NaN: every site would pass."""
    assert refusal(Limits(limit=value)) == f"limit={value}: give a finite number."
    assert refusal(Limits(some=[1.0, value])) == f"some={value}: give a finite number."
    assert refusal(Limits(inner=Inner(value))) == f"inner.share={value}: give a finite number."


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Limits(limit=0.0), "limit=0.0: give a number above 0."),
        (Limits(count=0), "count=0: give 1 or more."),
        (Limits(count=2**31), f"count={2**31}: give {2**31 - 1} or less."),
        (Limits(some=[4.0, 4.5]), "some=4.5: give 4 or less."),
        (Limits(inner=Inner(1.5)), "inner.share=1.5: give 1 or less."),
    ],
)
def test_a_number_out_of_bounds_is_answered_with_the_bound(settings: Limits, said: str) -> None:
    assert refusal(settings) == said


def test_bounds_themselves_are_within_but_for_those_to_be_above() -> None:
    check_numbers(Limits(limit=1e-300, count=1, some=[4.0], inner=Inner(0.0)))
    check_numbers(Limits(count=2**31 - 1, inner=Inner(1.0), is_on=False))


@dataclass
class Named:
    name: str


def command(**changes: Any) -> Config:
    groups = ("backend", "inputs", "port", "tolerance")
    usual = Config(job=Named("run"), **{name: Named(name) for name in groups})
    made = OmegaConf.structured(replace(usual, **changes))
    for group, keys in (
        ("scope", {"kind": "full"}),
        ("device_map", {"strategy": "cpu"}),
        ("model", {"name": "m"}),
        ("capture", {"name": "default"}),
    ):
        made[group] = OmegaConf.merge(made[group], keys)
    return checked(made)


def test_the_experts_own_degree_is_the_one_over_the_other() -> None:
    assert command(tp_degree=8, moe_ep_degree=4).moe_tp_degree == 2
    assert command(tp_degree=4, moe_ep_degree=4).moe_tp_degree == 1


@pytest.mark.parametrize(
    ("tp", "ep", "cure"),
    [(8, 3, "moe_ep_degree=1, or tp_degree=9"), (2, 4, "moe_ep_degree=2, or tp_degree=4")],
)
def test_groups_of_experts_that_do_not_divide_the_degree_are_refused(
    tp: int, ep: int, cure: str
) -> None:
    """Ranks beyond the last whole group would hold no expert's part, or another's."""
    with pytest.raises(UserError, match=cure):
        command(tp_degree=tp, moe_ep_degree=ep)


def test_a_job_that_cannot_say_what_it_would_do_does_not_do_it_instead() -> None:
    assert command(dry_run=True).dry_run
    with pytest.raises(UserError, match="job=bisect has none"):
        command(dry_run=True, job=Named("bisect"))
