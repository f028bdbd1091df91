"""Compute a stage in one process as the ranks of tensor parallelism would: sums over ranks.

Each rank's product is one of its own. Partial sums are rounded to the type of the run and added in
the order of the ranks, rank 0 first, as one part of a ring's all-reduce is; then comes the bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.shards import ExpertGroups, Heads, HeadShare, spans
from layerparity.anatomy.site import Site
from layerparity.anatomy.sizes import sizes_of
from layerparity.anatomy.split_plan import WITHIN_MODEL, plan_of, style_of
from layerparity.ground.errors import UserError
from layerparity.ports.observed.shard import (
    Forward,
    Spans,
    added,
    among,
    attention_by_rank,
    by_columns,
    by_rows,
    expert_shares,
)
from layerparity.record.ranks import RankRecord, Sharding

_HEAD = "lm_head"
# Sites of attention that ranks share by query heads, and by key heads.
_BY_QUERY = (".q_proj:out", ".q_norm:out", ":q_rotated", ":context")
_BY_KEY = (".k_proj:out", ".v_proj:out", ".k_norm:out", ":k_rotated")


class Ranks:
    """So many ranks, and how they share what a model computes.

    ``groups`` of them share the experts by their number, and the ranks of each group its experts by
    width: rank r is of group r // (count / groups).
    """

    def __init__(self, config: Any, count: int, groups: int = 1) -> None:
        self.count, self.groups = count, groups
        self.plan = plan_of(config)
        sizes = sizes_of(config)
        self.heads, self.experts = sizes.heads, sizes.experts
        self._refuse(config.get_text_config().model_type, max(sizes.divided.values()))
        self.shares = Heads(sizes.heads, sizes.kv_heads, count).shares()

    def _refuse(self, model: str, most: int) -> None:
        """Raise UserError with the cure where a model cannot be shared so."""
        if not self.plan:
            raise UserError(
                f"transformers has no tensor-parallel plan for {model}: leave port.emulate_tp out."
            )
        if self.count > most:
            raise UserError(
                f"port.emulate_tp={self.count}: the heads and widths of this {model} fill {most} "
                f"ranks at most: use {most} or fewer."
            )
        if self.groups > 1 and (not self.experts or self.experts % self.groups):
            has = f"{self.experts} experts" if self.experts else "no experts"
            raise UserError(
                f"port.emulate_ep={self.groups} does not divide the experts of this {model}, which "
                f"has {has}: use a number that does, or leave it out."
            )

    @contextmanager
    def around(self, module: nn.Module, path: str) -> Iterator[None]:
        """Let a stage's module compute as the ranks do inside; ``path`` is its place in the model.

        Modules that the plan does not name compute as they are, on each rank the same.
        """
        inside = WITHIN_MODEL.search(path)
        place = inside[1] if inside else path
        attending: dict[int, list[HeadShare]] = {}
        with ExitStack() as stack:
            for name, part in module.named_modules():
                full = f"{place}.{name}".rstrip(".")
                forward = self._forward(full, part)
                if forward is not None:
                    stack.enter_context(_computed_by(part, forward))
                if self._shares_heads(full, part):
                    # A rank whose heads are all padding attends to nothing.
                    attending[id(part)] = [each for each in self.shares if each.reads]
            if attending:
                stack.enter_context(attention_by_rank(attending, self.heads))
            yield

    def record(self, blocks: int) -> RankRecord:
        """Return which rank computes which heads, for the sites of so many blocks."""
        queries = [range(each.first, each.end) for each in self.shares]
        keys = [each.kept for each in self.shares]
        held = dict.fromkeys(_BY_QUERY, queries) | dict.fromkeys(_BY_KEY, keys)
        shardings = {
            str(Site.inside(layer, f"self_attn{local}")): Sharding.of("head", indices)
            for layer in range(blocks)
            for local, indices in held.items()
        }
        return RankRecord(self.count, shardings)

    def _style(self, path: str) -> str:
        return style_of(self.plan, path)

    def _forward(self, path: str, module: nn.Module) -> Forward | None:
        """Return how ranks compute a module of a path such as ``layers.0.mlp.down_proj``."""
        # The plan is that of the model below the head, which ranks share by its vocabulary.
        if path.rpartition(".")[2] == _HEAD and isinstance(module, nn.Linear):
            return by_rows(module, spans(module.out_features, self.count))
        style = self._style(path)
        if style == "moe_tp_experts":
            return self._experts(path, module)
        if not isinstance(module, nn.Linear):
            return None
        # A weight is [out, in]: columns of the product are rows of it.
        if style.startswith(("colwise", "packed_colwise")):
            return by_rows(module, self._rows(path, module))
        if style.startswith(("rowwise", "packed_rowwise")):
            return by_columns(module, self._columns(path, module))
        return None

    def _rows(self, path: str, module: nn.Linear) -> Spans:
        """Return the rows of a column-parallel projection that ranks compute, whole heads of it."""
        name = path.rpartition(".")[2]
        # Several ranks may hold one key head; their copies are equal, so one of them is computed.
        held = {kv: (kv, kv + 1) for share in self.shares for kv in share.kept}
        bounds = {
            "q_proj": [(each.first, each.end) for each in self.shares],
            "k_proj": list(held.values()),
            "v_proj": list(held.values()),
        }.get(name)
        heads = max((end for _, end in bounds), default=0) if bounds else 0
        if bounds is None or module.out_features % heads:
            return spans(module.out_features, self.count)
        width = module.out_features // heads
        return [(first * width, end * width) for first, end in bounds]

    def _columns(self, path: str, module: nn.Linear) -> Spans:
        """Return the inputs of a row-parallel projection that each rank holds."""
        owner = path.split(".")[-2]
        # Behind attention a rank's inputs are its own heads, which need not be evenly spread.
        if "att" not in owner or module.in_features % self.heads:
            return spans(module.in_features, self.count)
        width = module.in_features // self.heads
        return [(each.first * width, each.end * width) for each in self.shares]

    def _shares_heads(self, path: str, module: nn.Module) -> bool:
        """Say whether a module is attention whose projections are all split by heads."""
        inside = (f"{path}.{each}_proj" for each in "qkv")
        split = all(self._style(each).startswith("colwise") for each in inside)
        return split and self._style(f"{path}.o_proj").startswith("rowwise")

    def _experts(self, path: str, module: nn.Module) -> Forward:
        """Return how ranks compute experts: each the weighted sum over its part of them."""
        if getattr(module, "has_post_expert_norm", False) or "down_proj" not in module._parameters:
            # A norm of each expert's output has no partial sums: it waits for all of them.
            raise UserError(
                f"{path}: its experts are not two stacked projections, which is all that is shared "
                "by width: leave port.emulate_tp out."
            )
        styles = {name: self._style(f"{path}.{name}") for name in module._parameters}
        shared = ExpertGroups(self.experts, self.count, self.groups)
        # Ranks of a group hold parts of the same experts: its first one speaks for them.
        held = [shared.held_by(group * shared.ranks) for group in range(self.groups)]

        def forward(hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
            return added(
                # By the class: a copy's own forward is this function, which would end here again.
                type(module).forward(share, hidden, *among(routing, own.start, len(own)))
                for own in held
                for share in expert_shares(module, styles, own.start, len(own), shared.ranks)
            )

        return forward


@contextmanager
def _computed_by(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Let a module compute otherwise; where accelerate fetches its weights, below that."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    before = module.__dict__.get(name)
    module.__dict__[name] = forward
    try:
        yield
    finally:
        del module.__dict__[name]
        if before is not None:
            module.__dict__[name] = before
