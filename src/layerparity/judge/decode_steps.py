"""Decode steps: what a module computed at many of them, measured together.

A step has one token: to judge its sites one by one takes many times as long as to compute what is
judged. Whatever is unusual goes the way of single sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import PREFILL, WEIGHTS, Kind, Site
from layerparity.judge.align import Pair
from layerparity.judge.calibrate import Calibration
from layerparity.judge.evaluate import (
    BothSides,
    Measured,
    load,
    measure,
    passed_through,
    relative_errors,
    routed_alike,
)
from layerparity.judge.routing import Routing
from layerparity.judge.sides import RunSet
from layerparity.numbers.arithmetic import one_thread
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.numbers.metric import Chunk, Stream
from layerparity.numbers.pair_sums import row_sums

_FLOATS = {"float64", "float32", "bfloat16", "float16"}
# Elements of a group: larger sites take no longer alone.
_MOST = 1 << 16


def by_steps(pairs: Sequence[Pair], calibration: Calibration) -> Iterator[list[Pair]]:
    """Yield all pairs, those that `measure_steps` takes in groups of one site; others alone."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for number, pair in enumerate(pairs):
        golden, candidate = pair.golden.record, pair.candidate.record
        key: tuple[object, ...] = (number,)
        if _is_step(pair) and not _routed_apart(pair, calibration.routing):
            sides = (id(pair.golden.source), id(pair.candidate.source))
            dtypes = (golden.dtype, candidate.dtype)
            key = (pair.site.path, pair.site.end, sides, dtypes, golden.shape, golden.axes)
        groups.setdefault(key, []).append(pair)
    for group in groups.values():
        most = max(1, _MOST // max(1, int(np.prod(group[0].golden.record.shape))))
        for start in range(0, len(group), most):
            yield group[start : start + most]


def _is_step(pair: Pair) -> bool:
    """Say whether a pair is of one token's real numbers at a decode step, as most sites are."""
    golden, candidate = pair.golden.record, pair.candidate.record
    return (
        pair.site.phase != PREFILL
        and pair.kind is Kind.REAL
        and {golden.dtype, candidate.dtype} <= _FLOATS
        and golden.axes[:2] == ("batch", "token")
        and golden.shape[:2] == (1, 1)
        and golden.shape == candidate.shape
        and not pair.site.is_logits
    )


def _routed_apart(pair: Pair, routing: Routing) -> bool:
    """Say whether a pair holds the weights of experts that only one side chose."""
    if pair.site.end != WEIGHTS:
        return False
    alike = routed_alike(pair.site, routing.golden, routing.candidate, None)
    return alike is not None and not bool(alike.all())


def measure_steps(
    pairs: Sequence[Pair],
    golden: RunSet,
    candidate: RunSet,
    calibration: Calibration,
    blocks: Blocks,
    *,
    close: Closeness = CLOSE,
) -> dict[Site, Measured]:
    """Return what `measure` does of each of a group of pairs that `by_steps` yields.

    Raises UserError as it does.
    """
    sides = _stacked(pairs) if len(pairs) > 1 else None
    if sides is None:
        return {
            pair.site: measure(pair, golden, candidate, calibration, blocks, close=close)
            for pair in pairs
        }
    # A single site may be large, and takes all threads; these are many small pieces.
    with one_thread():
        return _together(pairs, sides, (golden, candidate), calibration, blocks, close=close)


def _together(
    pairs: Sequence[Pair],
    stored: tuple[torch.Tensor, torch.Tensor],
    runs: tuple[RunSet, RunSet],
    calibration: Calibration,
    blocks: Blocks,
    *,
    close: Closeness,
) -> dict[Site, Measured]:
    """Measure pairs whose tensors, golden and candidate, are ``stored``: finite [step, element]."""
    left, right = stored
    sums, calibrated = row_sums(left, right, close), calibration.of_steps(pairs, left, right)
    squares = np.array([[each.golden_squares, each.diff_squares] for each in sums])
    errors, usual = relative_errors(squares.T), (_varies(left) & _varies(right)).tolist()
    weights = pairs[0].site.end == WEIGHTS
    found: dict[Site, Measured] = {}
    for step, pair in enumerate(pairs):
        chunk = Chunk(left[step], right[step], close, sums=sums[step])
        # The weights of a token that goes to one expert are 1, however it was computed.
        metrics = _plain(chunk, usual[step] or weights)
        metrics |= passed_through(pair, *runs, blocks)
        own = calibrated[step]
        metrics |= own.metrics
        of_token = [] if weights else [errors[step]]
        found[pair.site] = Measured(metrics, of_token, None, own.profiles, own.lacking)
    return found


def _stacked(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both sides as stored, [step, element]; None of none, or where some is not finite."""
    left = torch.stack([load(pair.golden).reshape(-1) for pair in pairs])
    right = torch.stack([load(pair.candidate).reshape(-1) for pair in pairs])
    finite = all(bool(side.isfinite().all()) for side in (left, right))
    return (left, right) if finite and left.numel() else None


def _plain(chunk: Chunk, usual: bool) -> dict[str, float]:
    """Return a site's metrics that need no reference; of ``usual`` sides nothing is degenerate."""
    stream, alike = Stream(Kind.REAL), BothSides(repeats=False)
    stream.feed(chunk)
    if not usual:
        alike.feed(chunk)
    return stream.results() | alike.metrics()


def _varies(values: torch.Tensor) -> torch.Tensor:
    """Return bool [step]: finite [step, element] is neither constant nor all denormal there."""
    normal = values.abs() >= torch.finfo(values.dtype).smallest_normal
    return (values != values[:, :1]).any(1) & normal.any(1)
