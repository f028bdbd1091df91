"""Values: the stored tensors that hypotheses on a cause are tried on."""

from __future__ import annotations

import math
from contextlib import suppress

import torch

from layerparity.anatomy.site import PREFILL, Site
from layerparity.ground.errors import UserError
from layerparity.judge.align import last_alone
from layerparity.judge.rows import by_token, has_tokens, real_tokens
from layerparity.judge.sides import RunSet
from layerparity.mistakes.values import Values
from layerparity.record.guilt import Guilt
from layerparity.record.source import Source

# Elements of a site that hypotheses are tried on; of larger ones none is.
_MOST = 1 << 26


def _odd(candidate: Source, site: Site, golden: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return an odd rank's replica of what a candidate held at a site, where it is further off.

    All are floating, of one shape. Where ranks disagree, either side may be the wrong one.
    """
    record = candidate.manifest.replica(site)
    replica = candidate.load(record) if record is not None else held
    if replica.shape != golden.shape or not golden.is_floating_point():
        return held
    off = ((each.double() - golden.double()).norm() for each in (held, replica))
    return held if next(off) >= next(off) else replica


def values_at(guilt: Guilt, golden: RunSet, candidate: RunSet, local: str) -> Values | None:
    """Return a site of the guilty block and pass on both sides; None where it is not stored.

    So it is where nothing says how either side rounds, a site of whole numbers; and where a number
    is not finite. Where one of the candidate's ranks is odd, its replica counts.
    """
    if guilt.site is None:
        return None
    site = guilt.site.beside(local)
    left, right = golden.records.get(site), candidate.records.get(site)
    if left is None or right is None:
        return None
    # The axes of a dump are guessed: those of a run count.
    dumps = [each for each in (left, right) if not each.source.proved]
    axes = right.record.axes if left in dumps else left.record.axes
    last = last_alone(left.record, right.record)
    alike = (left.record.shape == right.record.shape or last) and (
        bool(dumps) or left.record.axes == right.record.axes
    )
    if not alike or not has_tokens(axes) or math.prod(left.record.shape) > _MOST:
        return None
    # A stored comparison is judged again without the tensors of its runs, too.
    loaded = []
    with suppress(UserError):
        loaded = [own.source.load(own.record) for own in (left, right)]
        loaded[0] = loaded[0][:, -1:] if last else loaded[0]
        loaded[1] = _odd(right.source, site, *loaded)
    steps = [torch.finfo(each.dtype).eps for each in loaded if each.is_floating_point()]
    own_step = getattr(torch, right.source.manifest.dtype, torch.float32)
    steps += [torch.finfo(own_step).eps] if own_step.is_floating_point else []
    # Types of eight bits cannot be picked from.
    rows = [by_token(each.double(), axes) for each in loaded]
    if not rows or not steps or not all(bool(each.isfinite().all()) for each in rows):
        return None
    mask = left.source.mask if site.phase == PREFILL and not last else None
    real = real_tokens(rows[0], mask)
    if real.shape != rows[0].shape[:2]:
        return None
    return Values(rows[0][real], rows[1][real], max(steps))
