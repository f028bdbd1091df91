"""Weights: whether two runs computed a stage from the same checkpoint, and what became of it.

Other tensors of the checkpoint make two runs strangers. What a port made of the same tensors is
not compared here but found: see `weights_diff`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import overlap
from layerparity.judge.sides import RunSet
from layerparity.judge.weights_diff import diff_weights
from layerparity.model.packing import is_scale
from layerparity.record.manifest import WeightPrint
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.source import Source
from layerparity.record.weights import WeightFinding

_Digests = Mapping[str, str]


def weights_differ(golden: Source, candidate: Source, stage: str) -> Reason | None:
    """Return what differs in a stage's weights, or None.

    Where only one run has a digest of the stage, as when one ran a component and the other its
    block, the tensors that the narrower one used are looked up among the wider one's. A tensor
    stored in two ways is one where both graphs hold the same values; one that a run with prints
    did not load is a finding, not a difference. Of what was computed elsewhere nothing is known.
    """
    if golden.manifest.elsewhere or candidate.manifest.elsewhere:
        return None
    left, right = (each.manifest.weights.get(stage) for each in (golden, candidate))
    if left == right:
        return None
    ours, theirs = golden.tensors_used(stage), candidate.tensors_used(stage)
    mine, its = (_prints_near(each, stage) for each in (golden, candidate))
    if left is not None and right is not None:
        names = [name for name in ours.keys() | theirs.keys() if _apart(ours, theirs, name)]
        apart = [n for n in names if not _explained(n, ours, theirs, mine, its)]
        return _other_weights(stage, apart) if apart or not names else None
    narrow, wide = sorted((ours, theirs), key=len)
    if not narrow:
        side = "golden" if left is None else "candidate"
        return Reason(ReasonKind.WEIGHTS_UNKNOWN, {"stage": stage, "side": side})
    names = [name for name in narrow if _apart(narrow, wide, name)]
    apart = [n for n in names if not _explained(n, ours, theirs, mine, its)]
    return _other_weights(stage, apart) if apart else None


def weight_findings(golden: RunSet, candidate: RunSet, blocks: Blocks) -> tuple[WeightFinding, ...]:
    """Return what is wrong, or notable, with the weights that both sides' graphs really used."""
    prints = [_prints(side) for side in (golden, candidate)]
    used = _merged(source.used for source in candidate.sources)
    return tuple(diff_weights(prints[0], prints[1], used, blocks))


def moved_by(golden: RunSet) -> float:
    """Return how far quantising moved a weight in the median, over the weight; 0 of none."""
    prints = (each for stage in _prints(golden).values() for each in stage.values())
    moved = [each.moved for each in prints if each.moved]
    return median(moved) if moved else 0.0


def silent_sides(golden: RunSet, candidate: RunSet) -> tuple[str, ...]:
    """Return the sides, golden or candidate, whose port does not say what weights it has."""
    sides = {"golden": _prints(golden), "candidate": _prints(candidate)}
    return tuple(role for role, prints in sides.items() if prints and not any(prints.values()))


def _prints(side: RunSet) -> dict[str, Mapping[str, Any]]:
    return _merged(source.effective for source in side.sources)


def _merged(each_side: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    return {stage: tensors for side in each_side for stage, tensors in side.items()}


def _prints_near(source: Source, stage: str) -> dict[str, WeightPrint]:
    """Return the prints of a stage, of what holds it and of what it holds, by stored name."""
    stages = [prints for name, prints in source.effective.items() if overlap(name, stage)]
    return {name: each for prints in stages for name, each in prints.items()}


def _explained(
    name: str,
    ours: _Digests,
    theirs: _Digests,
    mine: Mapping[str, WeightPrint],
    its: Mapping[str, WeightPrint],
) -> bool:
    """Return whether one tensor's digests may differ: same values held, or never loaded.

    A side that lists no FP8 scales has them in the digests of its weights, which cover the product.
    """
    if is_scale(name) and (name not in ours or name not in theirs):
        return True
    if name in mine and name in its and mine[name].digest == its[name].digest:
        return True
    return (name not in ours and bool(mine)) or (name not in theirs and bool(its))


def _apart(left: _Digests, right: _Digests, name: str) -> bool:
    return left.get(name) != right.get(name)


def _other_weights(stage: str, names: list[str]) -> Reason:
    """Return that a stage's weights differ, in the tensors ``names`` where those are known."""
    if not names:
        return Reason(ReasonKind.OTHER_WEIGHTS, {"stage": stage})
    values = {"stage": stage, "name": min(names)}
    if len(names) == 1:
        return Reason(ReasonKind.OTHER_TENSOR, values)
    return Reason(ReasonKind.OTHER_TENSORS, {**values, "others": len(names) - 1})
