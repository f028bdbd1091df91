"""Stage sites: which sites the ends of a stage are, and where a block's own sites lie."""

from __future__ import annotations

from dataclasses import replace

from layerparity.anatomy.family import HIDDEN, TOKENS
from layerparity.anatomy.site import DECODE, PREFILL, Kind, Site, SiteSpec

LOGITS = SiteSpec(("batch", "token", "vocabulary"))


def at(site: Site, step: int | None) -> Site:
    """Return a prefill site as it is at a decode step."""
    return site if step is None else replace(site, phase=DECODE, step=step)


def inside(layer: int | None, local: str) -> Site:
    """Return the site of a prefill at ``local``, such as ``mlp.gate:logits``, inside a block."""
    path, _, end = local.partition(":")
    return Site(f"layers.{layer}.{path}", end, PREFILL)


def boundary(stage: str) -> tuple[str, ...]:
    """Return the ends of a stage that are sites of their own.

    A component's are sites of its block, seen by taps; norm and head take what has a site already.
    """
    if stage in ("norm", "lm_head"):
        return ("out",)
    owner = Site(stage, "in")
    return ("in", "out") if owner.layer is None or not owner.component else ()


def boundary_spec(stage: str, end: str) -> SiteSpec:
    """Return axes and kind of what a stage takes in or gives out."""
    if stage == "embed_tokens":
        # The embedding copies rows: anything but equality is a mistake.
        return TOKENS if end == "in" else SiteSpec(HIDDEN.axes, Kind.EXACT)
    return LOGITS if (stage, end) == ("lm_head", "out") else HIDDEN
