"""Portraits: gather what a report shows of the guilty site, from stored tensors, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from layerparity.judge.rows import by_token, has_tokens, real_tokens
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.token_sums import CHANNEL, HEAD, TokenLayout
from layerparity.record.portrait import FLOOR, GOLDEN, Grouped, Portrait
from layerparity.record.verdict import Row, Verdict

MOST_GROUPS = 128
_CHOICES = "mlp.gate:choices"
_GROUPINGS = (HEAD, CHANNEL, "expert")


def portrait_of(verdict: Verdict, aligned: Alignment, calibration: Calibration) -> Portrait | None:
    """Return a portrait of the site that shows the guilt.

    Where that holds no real numbers by token, another site of the guilty block stands for it.
    Where nothing is wrong it is of the site with the largest error ratio; None without any site of
    real numbers.
    """
    pairs = {pair.site: pair for pair in aligned.pairs}
    chosen = choose_close_up(verdict, _shown(verdict.rows, pairs))
    if chosen is None:
        return None
    portrait = (
        _painted(pairs, chosen.site, calibration)
        if chosen.site is not None
        else Portrait(str(chosen.place), GOLDEN)
    )
    chained = verdict.candidate.feed != "isolated"
    floors = _local_floors(pairs, calibration) if chained else {}
    return replace(portrait, note=chosen.note, load=_load(pairs, chosen.place), local_floors=floors)


def _shown(rows: Sequence[Row], pairs: dict[Site, Pair]) -> list[Row]:
    return [row for row in rows if row.site in pairs and _can_be_shown(pairs[row.site], row)]


def _can_be_shown(pair: Pair, row: Row) -> bool:
    return pair.kind is Kind.REAL and has_tokens(pair.golden.record.axes) and bool(row.metrics)


def _painted(pairs: dict[Site, Pair], chosen: Site, calibration: Calibration) -> Portrait:
    """Return the portrait of a site: itself close up, and its groups in every block."""
    close = _close_up(pairs[chosen], calibration)
    found: dict[str, dict[str, list[float]]] = {}
    for pair in _siblings(pairs, chosen):
        for name, values in _grouped(pair, calibration, close.unit).items():
            found.setdefault(name, {})[str(pair.site)] = values
    groups = {name: _binned(values) for name, values in found.items()}
    return replace(close, groups=groups)


def _siblings(pairs: dict[Site, Pair], chosen: Site) -> Iterator[Pair]:
    for site, pair in pairs.items():
        same = (site.local, site.phase, site.step) == (chosen.local, chosen.phase, chosen.step)
        if same and pair.kind is Kind.REAL:
            yield pair


def _close_up(pair: Pair, calibration: Calibration) -> Portrait:
    left, right, mask = _read(pair)
    length = left.shape[1]
    laid = calibration.layout(pair)
    dtype = right.dtype
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
        worst=worst_elements(sides, floor, tokens, length, laid.heads),
    )


def _read(pair: Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both sides as [batch, token, ...], and which tokens are real, bool [batch, token]."""
    axes = pair.golden.record.axes
    left, right = (
        by_token(each.source.load(each.record), axes) for each in (pair.golden, pair.candidate)
    )
    mask = pair.golden.source.mask if pair.site.phase == PREFILL else None
    if mask is None and pair.site.phase == PREFILL:
        mask = pair.candidate.source.mask
    real = real_tokens(left, mask)
    return left, right, real if real.shape == left.shape[:2] else real_tokens(left, None)


def _calibrated(
    pair: Pair,
    calibration: Calibration,
    sides: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> JudgedSite | None:
    found = calibration.tensors(pair, *sides, mask)
    return None if isinstance(found, str) or not found.tokens.numel() else found


def _plain(
    sides: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
) -> tuple[Sides, torch.Tensor, None]:
    chosen = mask.flatten()
    left, right = (each.reshape(chosen.numel(), -1)[chosen] for each in sides)
    return Sides(left, right), torch.nonzero(chosen).flatten(), None


def _grouped(pair: Pair, calibration: Calibration, unit: str) -> dict[str, list[float]]:
    """Return a site's error by head, channel and expert, in floors or relative to the golden."""
    left, right, mask = _read(pair)
    if unit == FLOOR:
        calibrated = _calibrated(pair, calibration, (left, right), mask)
        profiles = {} if calibrated is None else deviation(calibrated).profiles
        names = {name: profiles.get(f"error_ratio {name}", []) for name in _GROUPINGS}
        return {name: values for name, values in names.items() if len(values) > 1}
    sides, _, _ = _plain((left, right), mask)
    laid = calibration.layout(pair)
    return {n: _relative(sides, laid, n) for n in laid.groupings if n in _GROUPINGS}


def _relative(sides: Sides, laid: TokenLayout, grouping: str) -> list[float]:
    golden = sides.golden.double()
    error = (sides.candidate.double() - golden).square().sum(0)
    ratio = laid.sums(error, grouping) / laid.sums(golden.square().sum(0), grouping)
    return [float(f"{sqrt(each):.4g}") for each in ratio.nan_to_num(0.0, inf, inf).tolist()]


def _binned(values: dict[str, list[float]]) -> Grouped:
    """Put neighbouring groups together, the largest of them counting, so that few remain."""
    count = max(len(each) for each in values.values())
    size = ceil(count / MOST_GROUPS)
    binned = {
        site: [max(each[at : at + size], key=_order) for at in range(0, len(each), size)]
        for site, each in values.items()
    }
    return Grouped(size, count, binned)


def _order(error: float) -> float:
    return inf if isnan(error) else error


def _load(pairs: dict[Site, Pair], chosen: Site) -> dict[str, dict[str, list[int]]]:
    """Return how many real tokens each expert of each block got, on both sides."""
    found = {}
    for site, pair in pairs.items():
        if site.local != _CHOICES or (site.phase, site.step) != (chosen.phase, chosen.step):
            continue
        left, right, mask = _read(pair)
        totals = pair.golden.source.manifest.layer_experts
        experts = totals.get(site.layer if site.layer is not None else -1, 0)
        counts = [torch.bincount(each[mask].flatten().long()) for each in (left, right)]
        width = max(experts, *(each.numel() for each in counts))
        sides = (torch.nn.functional.pad(each, (0, width - each.numel())) for each in counts)
        golden, candidate = (each.tolist() for each in sides)
        found[str(site)] = {"golden": golden, "candidate": candidate}
    return found


def _local_floors(pairs: dict[Site, Pair], calibration: Calibration) -> dict[str, float]:
    """Return the local noise floor (relative L2) of each block's output."""
    found = {}
    for site, pair in pairs.items():
        if site.layer is None or site.local != ":out" or site.phase != PREFILL:
            continue
        wide = calibration.references.local(pair)
        if wide is None:
            continue
        real = real_tokens(by_token(wide.values, pair.golden.record.axes), pair.golden.source.mask)
        squares = by_token(wide.values, pair.golden.record.axes)[real].double().square().sum()
        total = wide.floor.tokens[:, real.flatten()].double().sum(1).max()
        found[str(site)] = sqrt(float(total / squares)) if float(squares) else 0.0
    return found
