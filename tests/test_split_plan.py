"""Split plan: which weights tensor parallelism splits, and where; which it copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.anatomy.split_plan import check, notes, split_dimensions, split_plan
from layerparity.ground.errors import UserError

KEYS, VALUES, OUT = (f"layers.*.self_attn.{each}_proj" for each in "kvo")
UP, EXPERTS = "layers.*.mlp.up_proj", "layers.*.mlp.experts"
PLAN = {KEYS: "colwise", VALUES: "colwise", OUT: "rowwise", UP: "colwise"}


def config(plan: dict[str, str] | None) -> Any:
    text = SimpleNamespace(model_type="small", base_model_tp_plan=plan)
    return SimpleNamespace(get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("kv_heads", "degree", "is_split"), [(8, 2, True), (8, 8, True), (8, 16, False), (3, 2, False)]
)
def test_keys_and_values_are_split_where_each_device_has_whole_heads(
    kv_heads: int, degree: int, is_split: bool
) -> None:
    split = split_plan(config(PLAN), kv_heads, degree)
    assert split == (PLAN if is_split else {OUT: "rowwise", UP: "colwise"})


def test_alone_nothing_is_split() -> None:
    assert split_plan(config(PLAN), 8, 1) == {}
    assert notes({"KV heads": 8}, 1) == []


def test_a_bias_is_split_with_columns_and_whole_with_rows() -> None:
    shapes = {"up_proj.weight": 2, "up_proj.bias": 1, "down_proj.weight": 2, "down_proj.bias": 1}
    parameters = [(name, SimpleNamespace(dim=lambda n=n: n)) for name, n in shapes.items()]
    mlp: Any = SimpleNamespace(named_parameters=lambda: parameters)
    plan = {UP: "colwise", "layers.*.mlp.down_proj": "rowwise"}
    found = split_dimensions(plan, "model.layers.11.mlp", mlp)
    assert found == {"up_proj.weight": 0, "up_proj.bias": 0, "down_proj.weight": 1}


def test_what_the_degree_does_not_divide_is_said() -> None:
    (line,) = notes({"attention heads": 48, "KV heads": 8}, 16)
    assert "tp_degree=16 does not divide 8 KV heads:" in line
    assert notes({"attention heads": 48, "KV heads": 8}, 8) == []


@pytest.mark.parametrize("plan", [None, {}, {EXPERTS: "moe_tp_experts"}, {UP: "diagonal"}])
def test_a_model_without_a_plan_that_is_known_is_refused(plan: dict[str, str] | None) -> None:
    check(config(plan), 1)
    with pytest.raises(UserError, match=r"tp_degree=2: .* small cannot be .*use tp_degree=1\."):
        check(config(plan), 2)
    check(config(PLAN), 2)
