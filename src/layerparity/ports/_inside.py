"""Inside: what a stage of an architecture holds: its taps, its experts, what comes after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerparity.models.families.base import Family, Tap
from layerparity.models.skeleton import Skeleton
from layerparity.site import Site

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def taps_of(family: Family, skeleton: Skeleton, stage: str, wanted: Any) -> list[tuple[str, Tap]]:
    """Return the wanted taps inside a stage, each with its module path below the stage."""
    site = Site(stage, "in")
    if site.layer is None:
        return []
    inside = site.component
    found = []
    for tap in family.present(skeleton.module(f"layers.{site.layer}")):
        below = tap.module == inside or tap.module.startswith(f"{inside}.") or not inside
        own_output = inside != "" and tap.local == f"{inside}:out"
        if below and (own_output or wanted(layer=site.layer, local=tap.local)):
            found.append((tap.module.removeprefix(inside).removeprefix("."), tap))
    return found


def after_of(family: Family, skeleton: Skeleton, stage: str) -> Callable[..., Any] | None:
    """Return what the model computes of a stage's output before the next stage, or None."""
    after, config = family.after.get(stage), skeleton.config
    return None if after is None else lambda output: after(output, config)


def expert_count(config: Any) -> int:
    """Return how many experts a router chooses from, 0 for a dense model."""
    return next((int(n) for key in _COUNTS if (n := getattr(config, key, None))), 0)
