"""Ranks: replicas that disagree, and which ranks' part of a guilty site is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.site import Site
from layerparity.judge.sides import RunSet
from layerparity.judge.values import values_at
from layerparity.record.guilt import Guilt
from layerparity.record.ranks import Disagreement, RankRecord, Sharding
from layerparity.record.verdict import REPLICAS

if TYPE_CHECKING:
    from layerparity.mistakes.values import Values

# A rank's part is wrong where its error is so many times the least of all ranks'.
_TIMES = 5.0


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

    These are the ones whose weights are not the checkpoint's, whose replicas are odd, or whose part
    of the site is wrong while other ranks' parts are right. All of them together are none.
    """
    records = [each.ranks for each in candidate.manifests if each.ranks.degree > 1]
    if not records:
        return guilt
    degree = max(each.degree for each in records)
    named = {rank for each in records for rank in _of_weights(guilt, each.weights)}
    if guilt.site is not None and not named:
        apart = replicas_apart(candidate, guilt.site)
        named = set(apart.ranks) if apart is not None else _of_parts(guilt, golden, candidate)
    everybody = len(named) == degree
    return replace(guilt, ranks=() if everybody else tuple(sorted(named)), degree=degree)


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
    if shardings[0].axis not in inside:
        return set()
    errors = errors_by_rank(values, shardings[0], 1 + inside.index(shardings[0].axis))
    least = max(min(errors.values()), values.limit / _TIMES)
    return {rank for rank, error in errors.items() if error > _TIMES * least}


def errors_by_rank(values: Values, sharding: Sharding, dim: int) -> dict[int, float]:
    """Return each rank's ``||candidate - golden|| / ||golden||`` over its positions along ``dim``.

    A rank that holds nothing but padding has none.
    """
    places: dict[int, list[int]] = {}
    for start, stop, rank in sharding.shares:
        places.setdefault(rank, []).extend(range(start, stop))
    errors = {}
    for rank, own in places.items():
        index = torch.tensor(own)
        right = values.golden.index_select(dim, index)
        apart = values.candidate.index_select(dim, index) - right
        errors[rank] = float(apart.norm()) / max(float(right.norm()), 1e-300)
    return errors
