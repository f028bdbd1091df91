"""Evaluate: measure one site from its two stored tensors."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import CHOICES, PREFILL, WEIGHTS, Kind, Site, within
from layerparity.ground.errors import UserError
from layerparity.judge.align import Pair
from layerparity.judge.at_the_end import end_metrics
from layerparity.judge.calibrate import Calibration
from layerparity.judge.routing import replayed
from layerparity.judge.rows import by_token, chunks, has_tokens, real_tokens
from layerparity.judge.sides import RunSet, SideRecord, same_bytes
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.numbers.decimals import shortened
from layerparity.numbers.metric import FLOATING, Chunk, Stream
from layerparity.numbers.metrics.sets import sets_agree
from layerparity.record.reason import Reason, ReasonKind

_WORTH_A_THREAD = 1 << 18


@dataclass
class Measured:
    """A site's metrics by name, and the relative L2 error of each real token in batch-major order.

    ``nothing`` is why there are none. ``profiles`` are the calibrated metrics by group, float64
    [group]; ``lacking`` is why there are none of them.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    token_errors: list[float] = field(default_factory=list)
    nothing: Reason | None = None
    profiles: dict[str, np.ndarray] = field(default_factory=dict)
    lacking: Reason | None = None

    @property
    def groups(self) -> dict[str, list[float]]:
        """The profiles to four digits, as a comparison keeps them."""
        return {name: shortened(values, 4) for name, values in self.profiles.items()}


def measure(
    pair: Pair,
    golden: RunSet,
    candidate: RunSet,
    calibration: Calibration,
    blocks: Blocks,
    *,
    close: Closeness = CLOSE,
) -> Measured:
    """Return a pair's metrics over its real tokens; tensors are read, checked and let go.

    ``close`` says which elements are similar. Routing weights are compared at the tokens whose
    expert sets agree. Raises UserError where the golden holds NaN or Inf, or a tensor is damaged.
    """
    left, right = _load_both(pair)
    left = pair.cut(left)
    axes, mask = pair.golden.record.axes, pair.mask()
    real = mask
    routed = pair.site.end == WEIGHTS and pair.kind is Kind.REAL
    if routed:
        mask = routed_alike(pair.site, golden, candidate, mask)
    if mask is not None and has_tokens(axes) and by_token(left, axes).shape[:2] != mask.shape:
        shapes = {"mask": list(mask.shape), "tensor": list(left.shape)}
        return Measured(nothing=Reason(ReasonKind.MASK_SHAPE, shapes))
    # A step's few tokens may all be the same one.
    alike = BothSides(repeats=pair.site.phase == PREFILL)
    stream, errors, broken = Stream(pair.kind), [], 0
    for chunk in chunks(left, right, axes, mask, close):
        stream.feed(chunk)
        # The weights of a token that goes to one expert are 1, however it was computed.
        if pair.kind is Kind.REAL and not routed:
            alike.feed(chunk)
        broken += chunk.sums.golden_nonfinite if pair.kind in FLOATING else 0
        if has_tokens(axes) and left.is_floating_point() and not routed:
            errors += token_errors(chunk)
    if broken:
        raise UserError(
            f"The golden '{pair.golden.source.run.name}' has {broken} NaN or Inf at {pair.site}: "
            "it cannot be believed; make a new golden run."
        )
    if not stream.elements:
        kind = ReasonKind.NO_SET_AGREES if routed else ReasonKind.NO_ELEMENT
        return Measured(nothing=Reason(kind))
    metrics = stream.results() | alike.metrics()
    if metrics.get("nonfinite_disagreement"):
        return Measured(metrics, errors)
    calibrated = calibration.of(pair, left, right, real)
    metrics |= passed_through(pair, golden, candidate, blocks)
    if pair.site.is_logits and pair.kind is Kind.REAL and has_tokens(axes):
        metrics |= end_metrics(pair, left, right, real, calibrated.end)
    return Measured(
        metrics | calibrated.metrics, errors, None, calibrated.profiles, calibrated.lacking
    )


def token_errors(chunk: Chunk) -> list[float]:
    """Return ||c - g|| / ||g|| of each row of a [tokens, width] chunk, to six digits.

    0 where both rows are zero; Inf where only the golden's is, or a value is not finite.
    """
    return relative_errors(chunk.row_squares)


def relative_errors(squares: np.ndarray) -> list[float]:
    """Return `token_errors` from the sums of g^2 and of (c - g)^2, float64 [2, token]."""
    golden, error = np.sqrt(squares)
    # A comparison holds one for every token of every site: six digits keep its file readable.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / golden)
    return shortened(ratio, 6)


def _load_both(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Load both sides at once: a hash keeps one core busy, and lets go of the interpreter.

    A small tensor is hashed sooner than a thread is started.
    """
    if math.prod(pair.golden.record.shape) < _WORTH_A_THREAD:
        return load(pair.golden), load(pair.candidate)
    with ThreadPoolExecutor(1) as other:
        right = other.submit(load, pair.candidate)
        left = load(pair.golden)
        return left, right.result()


def load(own: SideRecord) -> torch.Tensor:
    """Return a record's tensor, as stored. Raises UserError where it is damaged."""
    return own.source.load(own.record)


def routed_alike(
    site: Site, golden: RunSet, candidate: RunSet, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Narrow a mask, bool [batch, token], to the tokens that both sides send to one expert set."""
    choices = Site(site.path, CHOICES, site.phase, site.step)
    left, right = golden.records.get(choices), candidate.records.get(choices)
    if left is None or right is None or left.record.shape != right.record.shape:
        return mask
    if not has_tokens(left.record.axes) or replayed(right):
        return mask
    g, c = (by_token(load(own), left.record.axes) for own in (left, right))
    real, agree = real_tokens(g, mask), sets_agree(g, c)
    return real & agree if real.shape == agree.shape else mask


CONSTANT, DENORMAL, NONFINITE = "constant", "denormal", "nonfinite"
FLAT, REPEATED = "flat", "repeated"
# What agrees on both sides and says nothing of either.
EMPTY = (CONSTANT, REPEATED, FLAT)
# Of fewer numbers, a token's may be equal as they should.
_SEVERAL = 16
# Roundings that equal numbers differ by, and in a type of two bytes, which keeps them equal.
_ROUNDINGS, _NARROW_ROUNDINGS = 8, 1
# A tensor whose first numbers differ is not looked at whole.
_FIRST = 64


class Degenerate:
    """What all numbers of one floating tensor have in common, fed piece by piece.

    A tensor is repeated where several tokens, the rows of pieces, all have the same numbers, which
    is looked for where ``repeats``, and flat where each token has one number throughout.
    """

    def __init__(self, *, repeats: bool) -> None:
        self._open = {CONSTANT, DENORMAL, NONFINITE, FLAT, *([REPEATED] if repeats else [])}
        self._first: float | None = None
        self._row = torch.empty(0)
        self._seen = self._rows = 0

    def feed(self, values: torch.Tensor) -> None:
        """Look at one more piece, of any shape; most are settled by its first few numbers."""
        self._seen += values.numel()
        self._rows += len(values) if values.dim() > 1 else 0
        begin = (values[:1], values[:2]) if values.dim() > 1 else (values[:_FIRST],)
        for piece in (*begin, values):
            if not self._open or not piece.numel():
                return
            if self._first is None:
                self._first, self._row = float(piece.reshape(-1)[0]), values[0]
            number, row = self._first, self._row
            self._open = {name for name in self._open if _holds(name, piece, number, row)}

    def result(self) -> tuple[str, float] | None:
        """Return what the tensor is, with the number it holds where it is constant, or None."""
        if self._seen < 2 or self._first is None:
            return None
        for name in (NONFINITE, CONSTANT, DENORMAL):
            if name in self._open:
                return name, self._first if name == CONSTANT else 1.0
        if REPEATED in self._open and self._rows > 1:
            return REPEATED, 1.0
        return (FLAT, 1.0) if FLAT in self._open else None


def _holds(name: str, piece: torch.Tensor, number: float, row: torch.Tensor) -> bool:
    """Say whether all of a piece is as ``name`` says, of a tensor's first number and row."""
    if name == REPEATED:
        return piece.dim() > 1 and bool(piece.eq(row).all())
    if piece.dtype.itemsize == 1:
        # Eight-bit numbers have no arithmetic of their own.
        piece = piece.float()
    if name == FLAT:
        return _is_flat(piece)
    if name == CONSTANT:
        return bool(piece.eq(number).all())
    if name == NONFINITE:
        return not bool(piece.isfinite().any())
    return bool(piece.abs().lt(torch.finfo(piece.dtype).smallest_normal).all())


def _is_flat(rows: torch.Tensor) -> bool:
    """Say whether each of several tokens has one number throughout, to rounding."""
    tokens = rows.flatten(1) if rows.dim() > 1 else rows[None, :0]
    if tokens.shape[1] < _SEVERAL:
        return False
    roundings = _NARROW_ROUNDINGS if tokens.dtype.itemsize == 2 else _ROUNDINGS
    most = roundings * torch.finfo(tokens.dtype).eps
    apart, size = tokens.amax(1) - tokens.amin(1), tokens.abs().amax(1)
    return bool(((apart <= most * size) & size.isfinite()).all())


class BothSides:
    """Both tensors of a site of real numbers, as they are streamed; see `Degenerate`."""

    def __init__(self, *, repeats: bool) -> None:
        self._sides = {side: Degenerate(repeats=repeats) for side in ("golden", "candidate")}

    def feed(self, chunk: Chunk) -> None:
        """Look at one more chunk of both."""
        self._sides["golden"].feed(chunk.golden)
        self._sides["candidate"].feed(chunk.candidate)

    def metrics(self) -> dict[str, float]:
        """Return ``candidate_constant`` and the like; of sides that are alike, what proves nothing.

        These are constants, and rows that are repeated or flat.
        """
        results = {side: each.result() for side, each in self._sides.items()}
        both = results["golden"]
        alike = results["golden"] == results["candidate"]
        if alike and (both is None or both[0] not in EMPTY):
            return {}
        return {f"{side}_{what[0]}": what[1] for side, what in results.items() if what is not None}


PASSED_THROUGH = "passed_through"


def passed_through(
    pair: Pair, golden: RunSet, candidate: RunSet, blocks: Blocks
) -> dict[str, float]:
    """Return the metric, 1, where a module put out what it was given; else nothing.

    That is where the candidate's bytes are those of the one value that its are computed from, and
    the golden's are not.
    """
    site = pair.site
    inside = site.layer is not None
    block = blocks.block(site.layer) if inside else blocks.outside(site.place)
    node = block.by_local.get(site.local) if block is not None else None
    if node is None or len(node.inputs) != 1:
        return {}
    # What goes out of a module is often the same as what goes out of the last one inside it.
    if within(node.inputs[0].partition(":")[0], node.module):
        return {}
    only_input = site.beside(node.inputs[0])
    sides = ((golden, pair.golden), (candidate, pair.candidate))
    same = [
        (fed := side.records.get(only_input)) is not None and same_bytes(fed, own)
        for side, own in sides
    ]
    return {PASSED_THROUGH: 1.0} if same == [False, True] else {}
