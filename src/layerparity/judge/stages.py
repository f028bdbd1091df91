"""Stages: which part of a run a site belongs to, and what that part was fed."""

from __future__ import annotations

from dataclasses import replace

from layerparity.anatomy.site import HEAD, PREFILL, TOKENS, Site
from layerparity.record.manifest import Feed, Manifest

CHAIN = "chain"


def stage_of(manifest: Manifest, site: Site) -> str | None:
    """Return the run's stage whose module path is the longest that holds the site's, or None."""
    path = site.path
    stages = set(manifest.stages)
    while path:
        if path in stages:
            return path
        path = path.rpartition(".")[0]
    return None


def chain_to(manifest: Manifest, site: Site) -> tuple[Feed | None, list[str]]:
    """Return the feed that a site's chain began with, and the stages from the one it fed on.

    The feed is the nearest one that is no chain, None where the manifest does not say. A decode
    step without feeds of its own goes back to the prompt's, which greedy generation follows from.
    """
    # What stands in no stage, such as the tokens that were generated, comes after the last one.
    stage = stage_of(manifest, site) or manifest.stages[-1]
    feeds = {feed.stage: feed for feed in manifest.feeds_of(*site.pass_step)}
    passed: list[str] = []
    for name in reversed(manifest.stages[: manifest.stages.index(stage) + 1]):
        passed.insert(0, name)
        if name in feeds and feeds[name].source != CHAIN:
            return feeds[name], passed
    if site.phase != PREFILL:
        return chain_to(manifest, Site(site.path, site.end))
    return None, passed


def is_feed(manifest: Manifest, site: Site) -> bool:
    """Return whether a site holds the very values its own stage was fed from outside the chain."""
    stage = stage_of(manifest, site)
    return any(
        feed.stage == stage
        and feed.source != CHAIN
        and (feed.site == site or (site.path == stage and site.end == "in"))
        for feed in manifest.feeds_of(*site.pass_step)
    )


def computed_at(manifest: Manifest, site: Site) -> Site:
    """Return where the values of a site were computed: a chained block's input, one stage before.

    Any other site is returned as it is.
    """
    if site.end != "in" or site.path not in manifest.stages or is_feed(manifest, site):
        return site
    at = manifest.stages.index(site.path)
    return replace(site, path=manifest.stages[at - 1], end="out") if at else site


def scores_of(site: Site) -> Site:
    """Return the site whose reference holds the scores that a choice was made from."""
    if site.path == TOKENS:
        step = (PREFILL, 0) if site.step == 0 else (site.phase, site.step)
        return Site(HEAD, "out", *step)
    return Site(site.path, "scores", site.phase, site.step)
