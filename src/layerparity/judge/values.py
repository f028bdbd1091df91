"""Values: the stored tensors that hypotheses on a cause are tried on."""

from __future__ import annotations

import math
from contextlib import suppress

import torch

from layerparity.anatomy.site import PREFILL
from layerparity.ground.errors import UserError
from layerparity.judge.rows import by_token, has_tokens, real_tokens
from layerparity.judge.sides import RunSet
from layerparity.mistakes.values import Values
from layerparity.record.guilt import Guilt

# Elements of a site that hypotheses are tried on; of larger ones none is.
_MOST = 1 << 26


def values_at(guilt: Guilt, golden: RunSet, candidate: RunSet, local: str) -> Values | None:
    """Return a site of the guilty block and pass on both sides; None where it is not stored.

    So it is where nothing says how either side rounds, a site of whole numbers; and where a number
    is not finite.
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
    alike = left.record.shape == right.record.shape and (
        bool(dumps) or left.record.axes == right.record.axes
    )
    if not alike or not has_tokens(axes) or math.prod(left.record.shape) > _MOST:
        return None
    # A stored comparison is judged again without the tensors of its runs, too.
    loaded = []
    with suppress(UserError):
        loaded = [own.source.load(own.record) for own in (left, right)]
    steps = [torch.finfo(each.dtype).eps for each in loaded if each.is_floating_point()]
    own_step = getattr(torch, right.source.manifest.dtype, torch.float32)
    steps += [torch.finfo(own_step).eps] if own_step.is_floating_point else []
    # Types of eight bits cannot be picked from.
    rows = [by_token(each.double(), axes) for each in loaded]
    if not rows or not steps or not all(bool(each.isfinite().all()) for each in rows):
        return None
    real = real_tokens(rows[0], left.source.mask if site.phase == PREFILL else None)
    if real.shape != rows[0].shape[:2]:
        return None
    return Values(rows[0][real], rows[1][real], max(steps))
