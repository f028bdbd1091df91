"""Print weights: what a graph really holds of each stored tensor, in a few hundred bytes.

A print has a hash of the values, their statistics and a sketch. What holds the checkpoint's own
bits needs the hash alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from layerparity.model.header import Stored
from layerparity.model.number_types import DTYPES
from layerparity.model.packed import PackedWeight
from layerparity.model.tensor_hashes import TensorHashes, values_digest
from layerparity.model.weight_sketch import CHUNK, ValueSums
from layerparity.record.manifest import WeightPrint

if TYPE_CHECKING:
    from torch import nn

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.skeleton import Skeleton


_THREADS = min(8, os.cpu_count() or 1)


def print_of(tensor: torch.Tensor, target: str = "") -> WeightPrint:
    """Return the print of a CPU tensor of any shape, floating, whose place is ``target``."""
    flat = tensor.detach().reshape(-1)
    tally = ValueSums()
    for start in range(0, flat.numel(), CHUNK):
        tally.add(start // CHUNK, flat[start : start + CHUNK])
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = values_digest(flat)
    return WeightPrint(tuple(tensor.shape), dtype, digest, tally.stats(), tally.sketch(), target)


def stage_prints(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    stage: str,
    frozen: Mapping[str, torch.Tensor],
    filled: Mapping[str, TensorHashes],
    *,
    trusting: bool = False,
) -> dict[str, WeightPrint]:
    """Return the prints of what a loaded stage holds, by stored name, compared with the checkpoint.

    Parameters and buffers are read where they are, one at a time; a stacked weight is put back
    into the stored tensors it was made of. What no stored tensor belongs to is left out. ``frozen``
    holds, by place, what the graph uses instead of some of them, in the same shapes; ``filled``
    the hashes of the stored tensors as they were read. ``trusting``: do not hash again a tensor
    whose ``_version`` is unchanged since it was filled; unsafe if the port writes through raw
    pointers.
    """

    def print_stored(name: str, held: torch.Tensor, place: str, same: bool) -> WeightPrint:
        known = filled.get(name)
        if known is not None and (same or values_digest(held) == known.values):
            return _as_filled(held, known, place, _stored_as(checkpoint.tensors[name]))
        return print_of(held, place)

    prints: dict[str, WeightPrint] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in held_on_cpu(skeleton.module(stage)):
            place = f"{stage}.{name}"
            held = frozen.get(place, tensor)
            weight = skeleton.weight(stage, name)
            stored = skeleton.as_stored(checkpoint, weight, held)
            same = trusting and place not in frozen and skeleton.untouched(weight)
            # To hand a small tensor to another thread takes longer than to print it.
            each = map if held.numel() <= CHUNK else pool.map
            printed = each(print_stored, stored, stored.values(), repeat(place), repeat(same))
            prints.update(zip(stored, printed, strict=True))
    return against(checkpoint, prints)


def _as_filled(tensor: torch.Tensor, filled: TensorHashes, place: str, own: str) -> WeightPrint:
    """Return the print of a tensor that holds what was read: a short one, if it was not rounded."""
    if not filled.exact:
        return replace(print_of(tensor, place), checkpoint="rounded", stored=own)
    flat = tensor.detach().reshape(-1)
    # The first few values tell nearly always; a whole tensor of answers would be as large again.
    first = flat[:1]
    constant = bool(flat.numel() and (flat[:CHUNK] == first).all() and (flat == first).all())
    ends = dict.fromkeys(("min", "max"), float(flat[0])) if constant else {}
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return WeightPrint(shape, dtype, filled.values, ends, (), place, "equal", own)


def _stored_as(stored: Stored) -> str:
    """Return torch's name of the type that a tensor is stored in, or a packing format's name."""
    known = DTYPES.get(stored.dtype)
    return stored.dtype if known is None else str(known).removeprefix("torch.")


def against(checkpoint: Checkpoint, prints: Mapping[str, WeightPrint]) -> dict[str, WeightPrint]:
    """Return prints by stored name, each with what the checkpoint says to it.

    A stored tensor is rounded to the print's dtype before it is compared. One whose values differ
    gets the print that was expected. What was compared before stays.
    """

    due = [
        name for name, ours in prints.items() if not ours.checkpoint and name in checkpoint.tensors
    ]

    def compare(name: str) -> WeightPrint:
        stored, ours = checkpoint.tensors[name], prints[name]
        if isinstance(stored, PackedWeight):
            # The values of a packed weight are products: they have no type but the one asked for.
            judged = _judged(ours, checkpoint.value(name, getattr(torch, ours.dtype)))
            return replace(judged, stored=_stored_as(stored))
        return _judged(ours, checkpoint.value(name))

    with ThreadPoolExecutor(_THREADS) as pool:
        return {**prints, **dict(zip(due, pool.map(compare, due), strict=True))}


def _judged(ours: WeightPrint, stored: torch.Tensor) -> WeightPrint:
    """Return a print with what became of the stored tensor: equal, rounded or differs."""
    own: torch.dtype = getattr(torch, ours.dtype)
    # Widening changes no value, and the hash is of widened values: no copy is needed.
    narrowed = torch.promote_types(own, stored.dtype) != own
    rounded = stored.to(own) if narrowed else stored
    name = str(stored.dtype).removeprefix("torch.")
    if values_digest(rounded) != ours.digest:
        return replace(
            ours, checkpoint="differs", stored=name, expected=print_of(rounded, ours.target)
        )
    same = not narrowed or values_digest(stored) == ours.digest
    return replace(ours, checkpoint="equal" if same else "rounded", stored=name)


def held_on_cpu(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and buffers on the CPU, by their path inside it."""
    for path, part in module.named_modules():
        for tensors in (part.named_parameters, part.named_buffers):
            for name, tensor in tensors(recurse=False):
                held = offloaded(part, name) if tensor.is_meta else tensor
                if held is not None:
                    yield f"{path}.{name}" if path else name, held.detach().cpu()


def offloaded(part: nn.Module, name: str) -> torch.Tensor | None:
    """Return a tensor, of any shape, that accelerate keeps while its module is idle, or None."""
    hook: Any = getattr(part, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        kept = getattr(each, "weights_map", None)
        if kept is not None and name in kept:
            found: torch.Tensor = kept[name]
            return found
    return None
