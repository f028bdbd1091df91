"""Weight prints: what a graph really holds of each stored tensor, in a few hundred bytes.

A print has a hash of the values, their statistics and a sketch. What holds the checkpoint's own
bits needs the hash alone.

The projection is a count sketch (Charikar, Chen, Farach-Colton 2002) of the values less their mean.
Sketches of two tensors tell by their angle whether one is the other changed a little, reordered, or
something else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from layerparity.ground.files import read_tensor
from layerparity.model import weight_types
from layerparity.model.filling import DTYPES, Filled, values_digest
from layerparity.record.manifest import WeightPrint

if TYPE_CHECKING:
    from torch import nn

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.skeleton import Skeleton


_THREADS = min(8, os.cpu_count() or 1)


def print_of(tensor: torch.Tensor, target: str = "") -> WeightPrint:
    """Return the print of a tensor on the CPU, whose place in the model is ``target``."""
    flat = tensor.detach().reshape(-1)
    tally = Tally()
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
    filled: Mapping[str, Filled],
    *,
    trusting: bool = False,
) -> dict[str, WeightPrint]:
    """Return the prints of what a loaded stage holds, by stored name, held against the checkpoint.

    Parameters and buffers are read where they are, one at a time; a stacked weight is put back
    into the stored tensors it was made of. What no stored tensor belongs to is left out. ``frozen``
    holds, by place, what the graph uses instead of some of them; ``filled`` says what the stored
    tensors held as they were read. ``trusting`` says that nobody writes past torch's own count of
    what is written: memory that was hashed when it was filled is then not hashed again.
    """

    def made(name: str, held: torch.Tensor, place: str, same: bool) -> WeightPrint:
        known = filled.get(name)
        if known is not None and (same or values_digest(held) == known.values):
            return _as_filled(held, known, place, checkpoint.tensors[name].dtype)
        return print_of(held, place)

    path = skeleton.path(stage)
    found: dict[str, WeightPrint] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in _on_cpu(skeleton.module(stage)):
            place = f"{stage}.{name}"
            held = frozen.get(place, tensor)
            stored = skeleton.as_stored(checkpoint, f"{path}.{name}", held)
            same = trusting and place not in frozen and skeleton.untouched(f"{path}.{name}")
            prints = pool.map(made, stored, stored.values(), repeat(place), repeat(same))
            found.update(zip(stored, prints, strict=True))
    return against(checkpoint, found)


def _as_filled(tensor: torch.Tensor, filled: Filled, place: str, stored: str) -> WeightPrint:
    """Return the print of a tensor that holds what was read: a short one, if it was not rounded."""
    own = str(DTYPES[stored]).removeprefix("torch.")
    if not filled.exact:
        return replace(print_of(tensor, place), checkpoint="rounded", stored=own)
    flat = tensor.detach().reshape(-1)
    constant = flat.numel() > 0 and _is_constant(flat)
    ends = dict.fromkeys(("min", "max"), float(flat[0])) if constant else {}
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return WeightPrint(shape, dtype, filled.values, ends, (), place, "equal", own)


def _is_constant(flat: torch.Tensor) -> bool:
    # The first few values tell nearly always; a whole tensor of answers would be as large again.
    return bool((flat[:CHUNK] == flat[:1]).all()) and bool((flat == flat[:1]).all())


def against(checkpoint: Checkpoint, prints: Mapping[str, WeightPrint]) -> dict[str, WeightPrint]:
    """Return prints by stored name, each with what the checkpoint says to it.

    A stored tensor is rounded to the print's dtype before it is compared. One whose values differ
    gets the print that was expected. What was compared before stays.
    """

    def held_against(name: str) -> WeightPrint:
        stored, made = checkpoint.tensors.get(name), prints[name]
        if made.checkpoint or stored is None:
            return made
        if stored.dtype in weight_types.STORED:
            # The values of an FP8 weight are products: they have no type but the one asked for.
            judged = _judged(made, checkpoint.value(name, getattr(torch, made.dtype)))
            return replace(judged, stored="float8_e4m3fn")
        return _judged(made, read_tensor(stored.file, name))

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(prints, pool.map(held_against, prints), strict=True))


def _judged(made: WeightPrint, stored: torch.Tensor) -> WeightPrint:
    own: torch.dtype = getattr(torch, made.dtype)
    rounded = _as(stored, own)
    name = str(stored.dtype).removeprefix("torch.")
    if values_digest(rounded) != made.digest:
        return replace(
            made, checkpoint="differs", stored=name, expected=print_of(rounded, made.target)
        )
    narrowed = torch.promote_types(own, stored.dtype) != own
    same = not narrowed or values_digest(stored) == made.digest
    return replace(made, checkpoint="equal" if same else "rounded", stored=name)


def _as(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Widening changes no value, and the hash is of widened values: no copy is needed.
    narrows = torch.promote_types(dtype, stored.dtype) != dtype
    return stored.to(dtype) if narrows else stored


def _bytes(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data


def _on_cpu(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and buffers on the CPU, by their path inside it."""
    for path, part in module.named_modules():
        for tensors in (part.named_parameters, part.named_buffers):
            for name, tensor in tensors(recurse=False):
                held = offloaded(part, name) if tensor.is_meta else tensor
                if held is not None:
                    yield f"{path}.{name}" if path else name, held.detach().cpu()


def offloaded(part: nn.Module, name: str) -> torch.Tensor | None:
    """Return a tensor that accelerate keeps elsewhere while its module does not run, or None."""
    hook: Any = getattr(part, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        kept = getattr(each, "weights_map", None)
        if kept is not None and name in kept:
            found: torch.Tensor = kept[name]
            return found
    return None


BUCKETS = 64
# Values that are float32 or float64 at one time: a large tensor never is.
CHUNK = 1 << 16


class Tally:
    """Sums over a tensor's chunks of `CHUNK` values, in float64."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._low, self._high = float("inf"), float("-inf")
        self._sketch = torch.zeros(BUCKETS, dtype=torch.float64)
        self._signs = torch.zeros(BUCKETS, dtype=torch.float64)

    def add(self, index: int, chunk: torch.Tensor) -> None:
        """Add a tensor's chunk number ``index``."""
        wide = chunk.float()
        values = wide.double()
        self._count += values.numel()
        self._sum += float(values.sum())
        self._squares += float(values.dot(values))
        low, high = wide.aminmax()
        self._low, self._high = min(self._low, float(low)), max(self._high, float(high))
        signs, turn = _signs()[: values.numel()], _pseudo_random(f"chunk {index}", BUCKETS)
        self._sketch += turn * _buckets(wide * signs)
        self._signs += turn * (_whole() if values.numel() == CHUNK else _buckets(signs))

    def stats(self) -> dict[str, float]:
        """Return mean, std, min, max and l2; zeros for no values."""
        count = max(self._count, 1)
        mean = self._sum / count
        spread = max(self._squares / count - mean * mean, 0.0) ** 0.5
        ends = (self._low, self._high) if self._count else (0.0, 0.0)
        return {
            "mean": mean,
            "std": spread,
            "min": ends[0],
            "max": ends[1],
            "l2": self._squares**0.5,
        }

    def sketch(self) -> tuple[float, ...]:
        """Return the sketch, at most as many numbers as there were values."""
        centred = self._sketch - self._signs * (self._sum / max(self._count, 1))
        kept = centred[: self._count].tolist()
        return tuple(float(f"{value:.5g}") for value in kept)


def _buckets(signed: torch.Tensor) -> torch.Tensor:
    """Sum a chunk, its elements multiplied by their signs, into its buckets."""
    left = -signed.numel() % BUCKETS
    padded = torch.nn.functional.pad(signed, (0, left)) if left else signed
    return padded.view(-1, BUCKETS).sum(dim=0).double()


@cache
def _whole() -> torch.Tensor:
    return _buckets(_signs())


@cache
def _signs() -> torch.Tensor:
    return _pseudo_random("element", CHUNK)


def _pseudo_random(seed: str, count: int) -> torch.Tensor:
    """Return +1 and -1, float32, from a standard's bits: the same everywhere and for ever."""
    raw = hashlib.shake_256(seed.encode()).digest(count // 8)
    octets = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    bits = (octets.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1).float() * 2 - 1
