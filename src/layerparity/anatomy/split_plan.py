"""Say which parameters tensor parallelism splits and along which dimension, or a refusal.

transformers' own plan decides. XLA's partitioner keeps the meaning of a program whatever is split,
so a plan here is about where weights lie, and the all-reduces follow from it. What a degree does
not divide is split all the same: XLA fills the last shards up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    from torch import nn

# The dimension that each style of a plan splits, from the end: the last two of a linear layer's
# weight, [out, in], and of experts stacked by width, [expert, out, in].
_COLUMNS = ("colwise", "colwise_gather_output", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "packed_rowwise")
# Experts stacked by number: whole ones, the first dimension.
_NUMBER = "grouped_gemm"
# Styles of modules that hold stacked experts.
_EXPERTS = ("ep_dispatch_experts", "moe_tp_experts")
# Styles of modules whose weights, if they have any, stay whole.
_WHOLE = (
    *_EXPERTS,
    "all_reduce",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "replicated_with_grad_allreduce",
)
_KNOWN = {*_COLUMNS, *_ROWS, _NUMBER, *_WHOLE}
_KV = (".k_proj", ".v_proj")
# Where in a path a block begins.
WITHIN_MODEL = re.compile(r"(?:^|\.)(layers\.\d+(?:\..+)?)$")


def check(config: Any, tp_degree: int) -> None:
    """Refuse a model that cannot be sharded. Raises UserError with the cure.

    ``config`` is transformers' configuration of the whole model.
    """
    if tp_degree == 1:
        return
    model, plan = config.get_text_config().model_type, plan_of(config)
    # Below, any other style counts as one of rows, so one that nobody knows is refused.
    odd = sorted(set(plan.values()) - _KNOWN)
    # A plan of whole weights alone would split nothing, whatever degree was asked.
    if odd or not set(plan.values()) - {*_WHOLE}:
        why = f"transformers' plan for it has {', '.join(odd)}" if odd else "it has no such plan"
        raise UserError(
            f"tp_degree={tp_degree}: models are sharded by transformers' tensor parallel plan, and "
            f"{model} cannot be ({why})",
            "use tp_degree=1.",
        )


def split_plan(config: Any, kv_heads: int, tp_degree: int) -> dict[str, str]:
    """Return what is split, by style: transformers' plan, less what is copied to every device.

    Keys and values of fewer heads than fit the degree are copied, as on Neuron.
    """
    plan = plan_of(config) if tp_degree > 1 else {}
    copied = _KV if kv_heads % tp_degree else ()
    return {k: style for k, style in plan.items() if style not in _WHOLE and not k.endswith(copied)}


def notes(sizes: Mapping[str, int], tp_degree: int) -> list[str]:
    """Return a line that says what the degree does not divide, if anything, and what is done.

    ``sizes`` are what tensor parallelism divides, by what a person calls it.
    """
    odd = ", ".join(f"{size} {what}" for what, size in sizes.items() if size % tp_degree)
    if not odd:
        return []
    return [
        f"tp_degree={tp_degree} does not divide {odd}: XLA pads the last shards, and keys and "
        "values whose heads do not divide are copied to every device."
    ]


def plan_of(config: Any) -> dict[str, str]:
    """Return transformers' tensor parallel plan: a style for each ``layers.*.mlp.up_proj``."""
    return dict(config.get_text_config().base_model_tp_plan or {})


def style_of(plan: Mapping[str, str], path: str) -> str:
    """Return a plan's style of a module or parameter such as ``layers.0.mlp.up_proj``, or ''.

    A plan has one entry for all blocks, ``layers.*.mlp.up_proj``.
    """
    return next((plan[key] for key in plan if _pattern(key).fullmatch(path)), "")


@cache
def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(key.replace(".", r"\.").replace("*", r"\d+"))


def split_dimensions(plan: Mapping[str, str], path: str, module: nn.Module) -> dict[str, int]:
    """Return the dimension to split by parameter name inside ``module``; the rest is replicated.

    ``path`` is the module's path in the model, such as ``model.layers.3`` or ``layers.3.mlp``.
    """
    inside = WITHIN_MODEL.search(path)
    if inside is None:
        return {}
    dimensions: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        # A plan names linear layers, and stacked experts by the parameter itself.
        full = f"{inside[1]}.{name}"
        style = style_of(plan, full) or style_of(plan, full.rpartition(".")[0])
        dimension = _dimension(style, parameter.dim()) if style else None
        if dimension is not None:
            dimensions[name] = dimension
    return dimensions


def experts_in(config: Any, path: str, module: nn.Module) -> set[str]:
    """Return the parameters inside ``module`` that are stacked experts, [expert, ...], by name.

    ``path`` is the module's path in the model, such as ``model.layers.3``.
    """
    inside = WITHIN_MODEL.search(path)
    plan = {key: style for key, style in plan_of(config).items() if style in _EXPERTS}
    names = (name for name, _ in module.named_parameters())
    return {
        name
        for name in names
        if inside and style_of(plan, f"{inside[1]}.{name}".rpartition(".")[0])
    }


def _dimension(style: str, dimensions: int) -> int | None:
    """Return which of a parameter's dimensions a style splits; None where it stays whole."""
    if style == _NUMBER:
        return 0
    if style in _COLUMNS:
        # A bias has the outputs alone, which are cut with the weight's.
        return max(dimensions - 2, 0)
    # A row-parallel bias is added once, after the partial sums: it stays whole.
    return dimensions - 1 if dimensions > 1 else None
