"""Chains: whether a golden's value came from the same start, through the same stages, as another.

A site's chain begins at the last stage that was fed from outside and passes every stage from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerparity.compare.sides import Found, Union
from layerparity.compare.stages import chain_to, is_feed, stage_of
from layerparity.compare.stored import Source
from layerparity.compare.weights import weights_differ
from layerparity.manifest import Feed
from layerparity.site import Site


def begun(source: Source, site: Site) -> tuple[Feed | None, list[str]]:
    """Return the feed that a site's chain began with, if known, and the stages passed since."""
    manifest = source.manifest
    # What stands in no stage, such as the tokens that were generated, comes after the last one.
    return chain_to(manifest, stage_of(manifest, site) or manifest.stages[-1], site)


def chain_differs(
    start: Feed, passed: Sequence[str], held: Found, goldens: Union, candidate: Source
) -> str:
    """Return what differs between a golden's chain to ``held`` and a candidate's; or nothing.

    The candidate's began with ``start`` and passed the stages ``passed``. The golden's must hold
    the same values there and have passed the same stages, with the same weights. Where a golden
    stage was fed from outside, its chain goes on in whichever golden computed those very values.
    """
    fed, own = begun(held.source, held.record.site)
    first = next((n for n, stage in enumerate(own) if _overlap(stage, passed[0])), None)
    value = held.source.manifest.hash_at(start.site)
    if first is not None and value is not None:
        if value != start.digest:
            return f"fed different values at {start.site} ({value[:8]} against {start.digest[:8]})"
        return _stages_differ(own[first:], passed, held.source, candidate)
    if fed is None:
        return f"the golden does not hold {start.site}, which {start.stage} was fed"
    place = next((n for n, stage in enumerate(passed) if _overlap(stage, fed.stage)), 0)
    later = _stages_differ(own, passed[place:], held.source, candidate)
    ends = place + (fed.stage != passed[place])
    tried = [
        chain_differs(start, passed[:ends], computed, goldens, candidate) or later
        for computed in _computed(fed, passed[place - 1] if ends == place else "", held, goldens)
        if ends
    ]
    return "" if "" in tried else next(iter(tried), _foreign(start, fed))


def _computed(fed: Feed, before: str, held: Found, goldens: Union) -> Iterator[Found]:
    """Yield where goldens computed what a stage was fed: at the output of the stage before it.

    Without one, as for a component, at the very site it was fed from.
    """
    site = Site(before, "out", fed.site.phase, fed.site.step) if before else fed.site
    # Forward order: a chain that is followed back comes to an end.
    if not site < held.record.site:
        return
    for source in dict.fromkeys((held.source, *reversed(goldens.sources))):
        record = source.manifest.record(site)
        if record and record.digest == fed.digest and not is_feed(source.manifest, site):
            yield Found(source, record)


def _stages_differ(
    own: Sequence[str], passed: Sequence[str], golden: Source, candidate: Source
) -> str:
    """Return which stage, or whose weights, a golden's chain and a candidate's do not share."""
    for ours, theirs in zip(own, passed, strict=False):
        if not _overlap(ours, theirs):
            return f"the golden passed {ours} where the candidate passed {theirs}"
        differing = weights_differ(golden, candidate, theirs)
        if differing:
            return differing
    if len(own) == len(passed):
        return ""
    longer, extra = ("golden", own) if len(own) > len(passed) else ("candidate", passed)
    return f"only the {longer} passed {extra[min(len(own), len(passed))]}"


def _foreign(start: Feed, fed: Feed) -> str:
    return (
        f"the golden's chain starts at {fed.site} ({fed.digest[:8]}), fed to {fed.stage} from "
        f"outside; the candidate's at {start.site} ({start.digest[:8]})"
    )


def _overlap(left: str, right: str) -> bool:
    """Return whether two stages are one, or one is a component of the other."""
    return f"{left}.".startswith(f"{right}.") or f"{right}.".startswith(f"{left}.")
