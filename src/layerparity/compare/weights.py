"""Weights: whether two runs computed a stage from the same tensors, and if not, from which."""

from __future__ import annotations

from layerparity.compare.stored import Source


def weights_differ(golden: Source, candidate: Source, stage: str) -> str:
    """Return what differs in a stage's weights, ``weights of layers.3 (name)``; or nothing.

    Where only one run has a digest of the stage, as when one ran a component and the other its
    block, the tensors that the narrower one used are looked up among the wider one's.
    """
    left, right = (each.manifest.weights.get(stage) for each in (golden, candidate))
    if left == right:
        return ""
    ours, theirs = golden.tensors_used(stage), candidate.tensors_used(stage)
    if left is not None and right is not None:
        names = sorted(name for name in ours.keys() | theirs.keys() if _apart(ours, theirs, name))
        return f"weights of {stage}{_list(names)}"
    narrow, wide = sorted((ours, theirs), key=len)
    if not narrow:
        side = "golden" if left is None else "candidate"
        return f"weights of {stage}, which the {side} has no fingerprint of"
    names = sorted(name for name in narrow if _apart(narrow, wide, name))
    return f"weights of {stage}{_list(names)}" if names else ""


def _apart(left: dict[str, str], right: dict[str, str], name: str) -> bool:
    return left.get(name) != right.get(name)


def _list(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f" ({names[0]}{more})"
