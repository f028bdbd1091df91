"""Garbage: what was imported is none, and the collector need not look through it again and again.

Torch, transformers and MLflow make a million objects when they are imported, and nearly all stay.
To look through them once takes a fifth of a second, and happens several times in a short command.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# How many modules there were when the collector last passed over what was there.
_imported: list[int] = []


def pass_over_imports() -> None:
    """Have the collector pass over what is there whenever modules came, up to the first run.

    For a process that is ours: a cycle that is garbage just then is never collected.
    """
    if _pass_over not in gc.callbacks:
        _imported[:] = [0]
        gc.callbacks.append(_pass_over)


def _pass_over(phase: str, info: Mapping[str, int]) -> None:
    # After the middle generation: the youngest holds much that is about to go.
    if phase == "stop" and info["generation"] == 1 and len(sys.modules) != _imported[0]:
        _imported[:] = [len(sys.modules)]
        gc.freeze()


@contextmanager
def passed_over() -> Iterator[None]:
    """Have the collector pass over what was there before a block, and over nothing afterwards.

    What a run computes, tensors among it, is collected as ever, inside of the block and after it.
    """
    if _pass_over in gc.callbacks:
        gc.callbacks.remove(_pass_over)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
