"""Portraits: gather what a report shows of the guilty site, from stored tensors, one at a time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, isnan, sqrt

import torch

from layerparity.anatomy.site import PREFILL, Kind, Site
from layerparity.judge.align import Alignment, Pair
from layerparity.judge.calibrate import Calibration
from layerparity.judge.closeup import (
    Sides,
    choose_close_up,
    quantiles,
    sigma,
    ulp_histogram,
    worst_elements,
)
from layerparity.judge.rows import by_token, has_tokens, places, real_tokens
from layerparity.numbers.decimals import shortened
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.token_sums import CHANNEL, HEAD
from layerparity.record.portrait import FLOOR, GOLDEN, Grouped, Portrait
from layerparity.record.reason import Reason
from layerparity.record.verdict import Verdict

MOST_GROUPS = 128
_CHOICES = "mlp.gate:choices"
_MOST_EXPERTS = 2**16
_GROUPINGS = (HEAD, CHANNEL, "expert")


def portrait_of(verdict: Verdict, aligned: Alignment, calibration: Calibration) -> Portrait | None:
    """Return a portrait of the site that shows the guilt.

    Where that holds no real numbers by token, another site of the guilty block stands for it.
    Where nothing is wrong it is of the site with the largest error ratio; None without any site of
    real numbers.
    """
    pairs = {pair.site: pair for pair in aligned.pairs}
    shown = [
        row
        for row in verdict.rows
        if row.metrics
        and (pair := pairs.get(row.site)) is not None
        and pair.kind is Kind.REAL
        and has_tokens(pair.golden.record.axes)
    ]
    chosen = choose_close_up(verdict, shown)
    if chosen is None:
        return None
    portrait = (
        _paint(pairs, chosen.site, calibration)
        if chosen.site is not None
        else Portrait(str(chosen.place), GOLDEN)
    )
    chained = verdict.feed != "isolated"
    floors = _local_floors(pairs, calibration) if chained else {}
    load = _load(pairs, chosen.place)
    return replace(portrait, instead=chosen.instead, load=load, local_floors=floors)


def _paint(pairs: dict[Site, Pair], chosen: Site, calibration: Calibration) -> Portrait:
    """Return the portrait of a site: itself close up, and its groups in every block."""
    close = _close_up(pairs[chosen], calibration)
    by_name: dict[str, dict[str, list[float]]] = {}
    for site, pair in pairs.items():
        same = (site.local, site.pass_step) == (chosen.local, chosen.pass_step)
        if same and pair.kind is Kind.REAL:
            for name, values in _groups(pair, calibration, close.unit).items():
                by_name.setdefault(name, {})[str(site)] = values
    return replace(close, groups={name: _bin(values) for name, values in by_name.items()})


def _close_up(pair: Pair, calibration: Calibration) -> Portrait:
    """Return the portrait of one site alone, in floors where there is a reference."""
    left, right, mask = _read(pair)
    laid = calibration.layout(pair)
    dtype = getattr(torch, pair.candidate.record.dtype)
    calibrated = _calibrated(pair, calibration, (left, right), mask)
    if calibrated is None:
        sides, tokens, floor = _plain((left, right), mask)
    else:
        sides = Sides(calibrated.golden, calibrated.candidate, calibrated.reference)
        tokens, floor = calibrated.tokens, sigma(calibrated)
    counts = {name: ulp_histogram(v, sides.believed, dtype) for name, v in sides.judged.items()}
    return Portrait(
        site=str(pair.site),
        unit=GOLDEN if floor is None else FLOOR,
        ulp=counts,
        ulp_dtype=str(dtype).removeprefix("torch."),
        quantiles={} if floor is None else quantiles(sides, floor),
        worst=worst_elements(sides, floor, places(tokens, mask, pair.positions()), laid.heads),
    )


def _read(pair: Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both sides as [batch, token, ...], and which tokens are real, bool [batch, token]."""
    axes = pair.golden.record.axes
    left, right = (
        by_token(_computable(each.source.load(each.record)), axes)
        for each in (pair.golden, pair.candidate)
    )
    left = pair.cut(left)
    real = real_tokens(left, pair.mask())
    return left, right, real if real.shape == left.shape[:2] else real_tokens(left, None)


def _computable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, numbers of eight bits as float32: they have no arithmetic of their own."""
    eight_bits = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.float() if eight_bits else tensor


def _calibrated(
    pair: Pair,
    calibration: Calibration,
    sides: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> JudgedSite | None:
    """Return a site's judged tokens, None without any; sides and mask are `_read`'s."""
    judged = calibration.tensors(pair, *sides, mask)
    return None if isinstance(judged, Reason) or not judged.tokens.numel() else judged


def _plain(
    sides: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
) -> tuple[Sides, torch.Tensor, None]:
    """Return both sides' real tokens, the numbers of these, and no floor: none is known."""
    chosen = mask.flatten()
    left, right = (each.reshape(chosen.numel(), -1)[chosen] for each in sides)
    return Sides(left, right), torch.nonzero(chosen).flatten(), None


def _groups(pair: Pair, calibration: Calibration, unit: str) -> dict[str, list[float]]:
    """Return a site's error by head, channel and expert, in floors or relative to the golden."""
    left, right, mask = _read(pair)
    if unit == FLOOR:
        calibrated = _calibrated(pair, calibration, (left, right), mask)
        profiles = {} if calibrated is None else deviation(calibrated).profiles
        named = {name: f"error_ratio {name}" for name in _GROUPINGS}
        known = {name: profiles[each] for name, each in named.items() if each in profiles}
        return {name: shortened(each, 4) for name, each in known.items() if each.size > 1}
    sides, _, _ = _plain((left, right), mask)
    golden = sides.golden.double()
    error = (sides.candidate.double() - golden).square().sum(0)
    size = golden.square().sum(0)
    laid = calibration.layout(pair)
    groups = {}
    for name in laid.groupings:
        if name in _GROUPINGS:
            ratio = laid.sums(error, name) / laid.sums(size, name)
            groups[name] = shortened(ratio.nan_to_num(0.0, inf, inf).sqrt().numpy(), 4)
    return groups


def _bin(values: dict[str, list[float]]) -> Grouped:
    """Put neighbouring groups together, the largest of them counting, so that few remain."""
    count = max(len(each) for each in values.values())
    size = ceil(count / MOST_GROUPS)
    bins = {
        site: [
            max(each[at : at + size], key=lambda error: inf if isnan(error) else error)
            for at in range(0, len(each), size)
        ]
        for site, each in values.items()
    }
    return Grouped(size, count, bins)


def _load(pairs: dict[Site, Pair], chosen: Site) -> dict[str, dict[str, list[int]]]:
    """Return how many real tokens each expert of each block got, on both sides, by site."""
    load = {}
    for site, pair in pairs.items():
        if site.local != _CHOICES or site.pass_step != chosen.pass_step:
            continue
        left, right, mask = _read(pair)
        totals = pair.golden.source.manifest.layer_experts
        experts = totals.get(site.layer if site.layer is not None else -1, 0)
        chosen_experts = [each[mask].flatten().long() for each in (left, right)]
        # Numbers of experts in the millions, or below zero, are none: each would have a bar.
        if any(
            each.numel() and not 0 <= each.min() <= each.max() < _MOST_EXPERTS
            for each in chosen_experts
        ):
            continue
        counts = [torch.bincount(each) for each in chosen_experts]
        width = max(experts, *(each.numel() for each in counts))
        sides = (torch.nn.functional.pad(each, (0, width - each.numel())) for each in counts)
        golden, candidate = (each.tolist() for each in sides)
        load[str(site)] = {"golden": golden, "candidate": candidate}
    return load


def _local_floors(pairs: dict[Site, Pair], calibration: Calibration) -> dict[str, float]:
    """Return the local noise floor (relative L2) of each block's output, by site."""
    floors = {}
    for site, pair in pairs.items():
        if site.layer is None or site.local != ":out" or site.phase != PREFILL:
            continue
        wide = calibration.references.local(pair)
        if wide is None:
            continue
        values = by_token(wide.values, pair.golden.record.axes)
        real = real_tokens(values, pair.golden.source.mask)
        squares = values[real].double().square().sum()
        total = wide.floor.tokens[:, real.flatten()].double().sum(1).max()
        floors[str(site)] = sqrt(float(total / squares)) if float(squares) else 0.0
    return floors
