"""Say which parameters tensor parallelism splits and along which dimension, or a refusal.

transformers' own plan decides. XLA's partitioner keeps the meaning of a program whatever is split,
so a plan here is about where weights lie, and the all-reduces follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from math import gcd
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    from torch import nn

# Dimension of a linear layer's weight ([out, in]) that each style of the plan splits.
_DIMENSION = {"colwise": 0, "rowwise": 1}
_ATTENTION = {f"layers.*.self_attn.{each}_proj" for each in "qkvo"}
_WITHIN_MODEL = re.compile(r"(?:^|\.)(layers\.\d+(?:\..+)?)$")


def check(config: Any, sizes: Mapping[str, int], tp_degree: int) -> None:
    """Refuse a model or a degree that cannot be sharded. Raises UserError with the cure.

    ``config`` is transformers' configuration of the whole model, ``sizes`` are what tensor
    parallelism divides, by what a person calls it.
    """
    if tp_degree == 1:
        return
    text = config.get_text_config()
    plan = plan_of(config)
    odd = sorted(set(plan.values()) - set(_DIMENSION))
    if odd or not set(plan) >= _ATTENTION:
        why = f"its plan also has {', '.join(odd)}" if odd else "it has no such plan"
        raise UserError(
            f"tp_degree={tp_degree}: only models of the Llama family are sharded, and "
            f"{text.model_type} is not one ({why})",
            "use tp_degree=1.",
        )
    if any(size % tp_degree for size in sizes.values()):
        has = ", ".join(f"{size} ({label})" for label, size in sizes.items())
        fit = ", ".join(str(each) for each in common_divisors(*sizes.values()))
        raise UserError(
            f"tp_degree={tp_degree} does not divide all of {has}", f"use one that does: {fit}."
        )


def plan_of(config: Any) -> dict[str, str]:
    """Return transformers' tensor parallel plan: a style for each ``layers.*.mlp.up_proj``."""
    return dict(config.get_text_config().base_model_tp_plan or {})


def common_divisors(*numbers: int) -> list[int]:
    """Return every number that divides all of them, ascending."""
    largest = reduce(gcd, numbers)
    return [each for each in range(1, largest + 1) if largest % each == 0]


def split_dimensions(plan: Mapping[str, str], path: str, module: nn.Module) -> dict[str, int]:
    """Return the dimension to split by parameter name inside ``module``; the rest is replicated.

    ``path`` is the module's path in the model, such as ``model.layers.3`` or ``layers.3.mlp``.
    """
    inside = _WITHIN_MODEL.search(path)
    if inside is None:
        return {}
    styles = {re.compile(key.replace(".", r"\.").replace("*", r"\d+")): plan[key] for key in plan}
    dimensions: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        full = f"{inside[1]}.{owner}".rstrip(".")
        style = next((s for pattern, s in styles.items() if pattern.fullmatch(full)), None)
        # A row-parallel bias is added once, after the partial sums: it stays whole.
        if style is not None and _DIMENSION[style] < parameter.dim():
            dimensions[name] = _DIMENSION[style]
    return dimensions
