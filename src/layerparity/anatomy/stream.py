"""Stream: what a block puts out is what the next one takes in, one tensor at two sites."""

from __future__ import annotations

from collections.abc import Iterable

from layerparity.anatomy.site import EMBEDDING, NORM, Site


def given_on(sites: Iterable[Site], layers: int) -> dict[Site, Site]:
    """Return the outputs of blocks that were recorded again as what takes them in, and where.

    That is the input of the next block, or ``norm:in``: what was computed with, where they differ.
    """
    held, found = frozenset(sites), {}
    for site in held:
        if site.layer is not None and site.local == ":out":
            after = f"layers.{site.layer + 1}" if site.layer + 1 < layers else NORM
            given = Site(after, "in", *site.pass_step)
            if given in held:
                found[site] = given
    return found


def same_elsewhere(sites: Iterable[Site], layers: int) -> dict[Site, Site]:
    """Return the ends of blocks that were not recorded, and where each one's tensor was.

    That is a block's input from the output before it, and its output from the input after it; the
    last block's from ``norm:in``. For what ran as a chain, of so many ``layers``.
    """
    held, found = frozenset(sites), {}
    for phase, step in {site.pass_step for site in held}:
        for layer in range(layers + 1):
            before = Site(f"layers.{layer - 1}" if layer else EMBEDDING, "out", phase, step)
            given = Site(f"layers.{layer}" if layer < layers else NORM, "in", phase, step)
            if before in held and given not in held and layer < layers:
                found[given] = before
            # What stands between the embedding and the first block, a family may scale.
            if given in held and before not in held and layer:
                found[before] = given
    return found
