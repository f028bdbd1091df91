"""The known fault that no tensor shows: a stacking buffer in float32 in a bfloat16 run.

Its values are right once they are cast, and its memory is not: the audit has to say what it takes,
and the loader must not be able to make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Place, Site
from layerparity.selftest.cells import GridCell, Setting
from layerparity.selftest.outcomes import CellResult, Ending

if TYPE_CHECKING:
    import torch

    from layerparity.model.checkpoint import Checkpoint

UPCAST = "fp32_upcast"


def upcast(checkpoint: Checkpoint, model: str) -> Iterator[CellResult]:
    """Yield whether the audit names the buffer; nothing where the model stacks no weights.

    It is named where the audit gives the very bytes that a loader for float32 takes for its largest
    buffer, and a loader for bfloat16 takes no more than its own figure.
    """
    import torch

    from layerparity.checkpoint.audit import examine

    peaks = examine(checkpoint).peaks
    if not peaks or not peaks["fp32"].largest:
        return
    where = peaks["fp32"].largest
    layer = Site(where, "in").layer
    types = (torch.bfloat16, torch.float32)
    sound, planted = (_largest(checkpoint, str(Place(layer)), dtype) for dtype in types)
    named = planted == peaks["fp32"].buffer and sound == peaks["bf16"].buffer < planted
    cell = GridCell(
        Setting(model, "loading", "bfloat16"), UPCAST, {}, layer, "mlp.experts", "audit"
    )
    note = f"{where} stacked in float32 takes {planted} bytes, in bfloat16 {sound}"
    ending = Ending.NAMED if named else Ending.MISSED
    yield CellResult(cell, ending, where if named else "", "audit" if named else "", note=note)


def _largest(checkpoint: Checkpoint, stage: str, dtype: torch.dtype) -> int:
    """Return the bytes of the largest buffer that loading a stage in a type takes."""
    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    skeleton = Skeleton(read_config(checkpoint.config), dtype, "eager", "eager")
    skeleton.load(checkpoint, stage)
    return skeleton.largest_buffer
