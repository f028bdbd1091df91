"""Ranks: replicas that disagree, and which ranks' part of a guilty site is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.shards import spans
from layerparity.anatomy.site import Site
from layerparity.judge.sides import RunSet
from layerparity.judge.values import values_at
from layerparity.mistakes.block import CHOICES, LOGITS
from layerparity.mistakes.catalogue import catalogue, known_fault
from layerparity.mistakes.values import ENOUGH
from layerparity.record.guilt import Cause, Guilt
from layerparity.record.ranks import Disagreement, RankRecord, Sharding
from layerparity.record.verdict import REPLICAS

if TYPE_CHECKING:
    from layerparity.mistakes.values import Values

# A rank's part is wrong where its error is so many times the least of all ranks'.
_TIMES = 5.0
# What the ranks' experts add up to.
_SUMS = ("mlp.experts:out", "mlp:out")
# What attention makes of keys and values.
_ATTENDED = ("self_attn:context", "self_attn:out")


def rank_records(side: RunSet, site: Site) -> list[RankRecord]:
    """Return what is known of the ranks of the run that holds a site; none where it had none."""
    held = side.records.get(site)
    record = held.source.manifest.ranks if held is not None else RankRecord()
    return [record] if record.degree > 1 else []


def replicas_apart(side: RunSet, site: Site) -> Disagreement | None:
    """Return how far the ranks' replicas of a site are apart, if by more than its dtype rounds."""
    plain = str(Site(site.path, site.end))
    for record in rank_records(side, site):
        found = record.disagreements.get(plain)
        dtype = getattr(torch, side.records[site].record.dtype)
        step = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        if found is not None and found.relative > step:
            return found
    return None


def replica_metric(side: RunSet, site: Site) -> dict[str, float]:
    """Return the metric of replicas that disagree at a site; none where they do not."""
    found = replicas_apart(side, site)
    return {} if found is None else {REPLICAS: found.relative}


def with_ranks(guilt: Guilt, golden: RunSet, candidate: RunSet) -> Guilt:
    """Return a guilty place with the ranks that are at fault, where that can be told.

    These are the ones whose weights are not the checkpoint's, whose replicas are odd, whose part of
    the site is wrong, to whose experts every wrong token was routed, or whose KV heads are others
    than their query heads read. All of them are named where each is wrong.
    """
    records = [each.ranks for each in candidate.manifests if each.ranks.degree > 1]
    if not records:
        return guilt
    degree = max(each.degree for each in records)
    named = {rank for each in records for rank in _of_weights(guilt, each.weights)}
    if guilt.site is not None and not named:
        apart = replicas_apart(candidate, guilt.site)
        named = set(apart.ranks) if apart is not None else _of_parts(guilt, golden, candidate)
        named = named or _of_experts(guilt, golden, candidate, degree)
        named = named or _of_keys(guilt, candidate)
    return replace(guilt, ranks=tuple(sorted(named)), degree=degree)


def makers_of(causes: Sequence[Cause], degree: int) -> tuple[int, ...]:
    """Return all of so many ranks where the first cause is shown and is a mistake that all make."""
    shown = [each.id for each in causes[:1] if each.shown and each.id in catalogue()]
    faults = (known_fault(each) for each in shown)
    shared = any(fault.degree > 1 and fault.rank is None for fault in faults)
    return tuple(range(degree)) if shared and degree > 1 else ()


def _of_weights(guilt: Guilt, wrong: Mapping[str, tuple[int, ...]]) -> set[int]:
    return {rank for each in guilt.findings for rank in wrong.get(each.name, ())}


def _of_parts(guilt: Guilt, golden: RunSet, candidate: RunSet) -> set[int]:
    """Return the ranks whose own positions of the guilty site are wrong."""
    assert guilt.site is not None
    site, plain = guilt.site, str(Site(guilt.site.path, guilt.site.end))
    shardings = [each.shardings.get(plain) for each in rank_records(candidate, site)]
    values = values_at(guilt, golden, candidate, site.local)
    if not shardings or shardings[0] is None or values is None:
        return set()
    axes = candidate.records[site].record.axes
    inside = [axis for axis in axes if axis not in ("batch", "token")]
    sharding = shardings[0]
    if sharding.axis == "head" and inside == ["channel"]:
        sharding = sharding.widened("channel", values.golden.shape[1])
    if sharding.axis not in inside:
        return set()
    errors = errors_by_rank(values, sharding, 1 + inside.index(sharding.axis))
    if min(errors.values()) > values.limit:
        # No rounding: none of them is right, whichever is off by most.
        return set(errors)
    least = max(min(errors.values()), values.limit / _TIMES)
    return {rank for rank, error in errors.items() if error > _TIMES * least}


def errors_by_rank(values: Values, sharding: Sharding, dim: int) -> dict[int, float]:
    """Return each rank's ``||candidate - golden|| / ||golden||`` over its positions along ``dim``.

    A rank that holds nothing but padding has none.
    """
    errors = {}
    for rank, own in sharding.places().items():
        index = torch.tensor(own)
        right = values.golden.index_select(dim, index)
        apart = values.candidate.index_select(dim, index) - right
        errors[rank] = float(apart.norm()) / max(float(right.norm()), 1e-300)
    return errors


def _of_experts(guilt: Guilt, golden: RunSet, candidate: RunSet, degree: int) -> set[int]:
    """Return the rank to whose experts every wrong token was routed, at a sum over experts.

    None where the tokens leave two ranks, or none is right. Who holds which experts is what the
    run says, else each rank an equal number in a row.
    """
    assert guilt.site is not None
    site = guilt.site
    values = values_at(guilt, golden, candidate, site.local) if site.local in _SUMS else None
    chosen = values_at(guilt, golden, golden, CHOICES)
    scored = golden.records.get(site.beside(LOGITS))
    if values is None or chosen is None or scored is None:
        return set()
    count = scored.record.shape[-1]
    plain = str(Site(site.path, site.end))
    said = (each.shardings.get(plain) for each in rank_records(candidate, site))
    even = Sharding.of("expert", (range(*span) for span in spans(count, degree)))
    held = next((each for each in said if each is not None and each.axis == "expert"), even)
    return routed_to(values, chosen.golden, held)


def _of_keys(guilt: Guilt, candidate: RunSet) -> set[int]:
    """Return the ranks that hold other KV heads than their query heads read, where attention fails.

    Nothing where the run does not say which channels of either a rank has.
    """
    assert guilt.site is not None
    if guilt.site.local not in _ATTENDED:
        return set()
    records = rank_records(candidate, guilt.site)
    query, key = (_held(records, guilt.site, each) for each in ("q_proj", "k_proj"))
    heads = gcd(*(edge for own in key.values() for edge in (own[0], own[-1] + 1)))
    ratio = Fraction(_size(query), max(_size(key), 1))
    if not heads or ratio.denominator > 1:
        return set()
    wrong = set()
    for rank in query.keys() & key.keys():
        reads = {channel // (heads * ratio.numerator) for channel in query[rank]}
        if not reads <= {channel // heads for channel in key[rank]}:
            wrong.add(rank)
    return wrong


def _held(records: Sequence[RankRecord], site: Site, projection: str) -> dict[int, list[int]]:
    """Return which channels of a projection of the prefill each rank holds, in their order."""
    plain = str(Site(f"{site.path}.{projection}", "out"))
    said = (each.shardings.get(plain) for each in records)
    held = next((each for each in said if each is not None and each.axis == "channel"), None)
    return {rank: sorted(own) for rank, own in held.places().items()} if held else {}


def _size(held: Mapping[int, Sequence[int]]) -> int:
    return 1 + max((own[-1] for own in held.values()), default=-1)


def routed_to(values: Values, chosen: torch.Tensor, held: Sharding) -> set[int]:
    """Return the one rank to whose experts all wrong tokens were routed; nothing where open.

    ``chosen`` are the experts of each token, [token, k]. Each other rank is refuted by a wrong
    token that none of its experts had a part in.
    """
    off, size = (
        (x.flatten(1).norm(dim=1)) for x in (values.candidate - values.golden, values.golden)
    )
    wrong = off > _TIMES * values.limit * size
    if int(wrong.sum()) < ENOUGH or not bool((off <= values.limit * size).any()):
        return set()
    routes = {
        rank: torch.isin(chosen.long(), torch.tensor(own)).any(1)
        for rank, own in held.places().items()
    }
    fitting = [rank for rank, routed in routes.items() if bool(routed[wrong].all())]
    return set(fitting) if len(fitting) == 1 else set()
