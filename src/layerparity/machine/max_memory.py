"""Read ``max_memory``, and say how many bytes each device may hold for a strategy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn


SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
# More than any machine holds, and still an integer that accelerate can add to.
UNLIMITED = 2**62
# What is left beside the weights is for activations and the cache.
SHARE = 0.9

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_ENTRY = re.compile(
    r"^(?:(?P<device>\d+|cpu)\s*:\s*)?(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?i?B)$",
    re.IGNORECASE,
)
_CUDA = re.compile(r"^cuda:(\d+)$")
_FORMS = "Write max_memory=40GB (every GPU) or 'max_memory=\"0:60GB,1:60GB,cpu:100GB\"'."


@dataclass(frozen=True)
class Limits:
    """What ``max_memory`` says, in bytes: for every GPU, for GPUs by index, for the CPU."""

    every: int | None = None
    gpus: dict[int, int] = field(default_factory=dict)
    cpu: int | None = None


def parse_limits(text: str | None) -> Limits:
    """Read ``40GB`` or ``0:60GB,1:60GB,cpu:100GB``; GB is 10^9 bytes and GiB 2^30.

    Raises UserError with the right form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        match = _ENTRY.match(part.strip())
        if match is None or match["unit"].upper() not in _UNITS:
            raise UserError(f"max_memory has '{part.strip()}', which is not a size. {_FORMS}")
        device = match["device"]
        key = "every GPU" if device is None else f"{int(device)}" if device.isdigit() else "cpu"
        if key in sizes:
            raise UserError(f"max_memory limits {key} twice. {_FORMS}")
        sizes[key] = int(float(match["number"]) * _UNITS[match["unit"].upper()])
    every, cpu = sizes.pop("every GPU", None), sizes.pop("cpu", None)
    if every is not None and sizes:
        raise UserError("max_memory limits every GPU and single GPUs", f"choose one. {_FORMS}")
    return Limits(every, {int(key): size for key, size in sizes.items()}, cpu)


def check_strategy(strategy: str) -> None:
    """Raise UserError unless ``strategy`` is one of accelerate's, ``cpu`` or ``cuda:N``."""
    if strategy not in (*SPREAD, "cpu", STREAM) and not _CUDA.match(strategy):
        known = [*SPREAD, "cpu", STREAM, "cuda:0"]
        raise UserError(
            f"device_map={strategy} is unknown.{nearest(strategy, known)} "
            f"Known: {', '.join(SPREAD)}, cpu, {STREAM}, cuda:N."
        )


def budget(
    strategy: str, limits: Limits, gpus: Sequence[int], cpu: int = UNLIMITED
) -> dict[int | str, int]:
    """Return the bytes each device may hold under a strategy: GPUs by index, and ``cpu``.

    ``gpus`` and ``cpu`` are the free bytes of the machine, or of a pretended one. Raises UserError
    for a GPU that is not there, and for a limit on a device the strategy does not use.
    """
    _check_gpus(strategy, limits, len(gpus))
    if strategy == "cpu":
        return {"cpu": UNLIMITED if limits.cpu is None else limits.cpu}
    memory: dict[int | str, int] = {}
    single = _CUDA.match(strategy)
    for index in [int(single[1])] if single else range(len(gpus)):
        allowed = limits.gpus.get(index, 0) if limits.gpus else limits.every
        free = gpus[index]
        memory[index] = int(SHARE * free) if allowed is None else min(allowed, free)
    if single:
        return memory
    memory = {index: size for index, size in memory.items() if size > 0}
    # Without a GPU everything runs on the CPU, as device_map=cpu would; with one, the CPU is where
    # weights wait that no GPU has room for.
    own = int(SHARE * cpu) if memory or strategy == STREAM else UNLIMITED
    return {**memory, "cpu": own if limits.cpu is None else limits.cpu}


def _check_gpus(strategy: str, limits: Limits, count: int) -> None:
    if strategy == "cpu":
        if limits.every is not None or limits.gpus:
            raise UserError("device_map=cpu uses no GPU", "write max_memory=cpu:40GB, or leave it.")
        return
    if limits.every is not None and not count:
        raise UserError(
            "max_memory without a device limits GPUs, and this machine has none",
            "write max_memory=cpu:40GB, or leave it.",
        )
    single = _CUDA.match(strategy)
    asked = [int(single[1])] if single else []
    for index in [*asked, *limits.gpus]:
        if index >= count:
            here = f"this machine has {count} GPU{'' if count == 1 else 's'}"
            cure = f"the last one is cuda:{count - 1}" if count else "use device_map=cpu"
            where = "" if index in asked else " in max_memory"
            raise UserError(f"cuda:{index} was asked for{where}; {here}", f"{cure}.")
    if single and (limits.cpu is not None or set(limits.gpus) - set(asked)):
        raise UserError(
            f"device_map={strategy} uses only {strategy}",
            f"write max_memory={asked[0]}:40GB, or use device_map=auto.",
        )


def size_text(size: int) -> str:
    """Return bytes as ``max_memory`` reads them, rounded up, such as ``7.34GB``."""
    unit = next((u for u in ("TB", "GB", "MB", "KB") if size >= _UNITS[u]), "B")
    return f"{math.ceil(size / _UNITS[unit] * 100) / 100:g}{unit}"


STREAM = "stream"
# What a run takes beside its weights: stacks of its threads, scratch, what flows between stages.
WORK = 256 << 20
# XLA:CPU's device is the host: while weights move, both hold them, and then what is fetched for
# their prints. Measured at 2.3.
STAND_IN_COPIES = 2.5


def room_for_weights(free: int, beside: int = 0) -> int:
    """Return what is left of ``free`` bytes for weights; ``beside`` is what is known to be held."""
    return max(0, free - WORK - beside)


def widest_copy(modules: Iterable[nn.Module], dtype: torch.dtype) -> int:
    """Return the bytes of the largest weight in ``dtype``, as a reference widens it to multiply.

    Stacked experts are widened one at a time, and an embedding is looked up as it is.
    """
    from torch import nn

    linear = (each for module in modules for each in module.modules() if type(each) is nn.Linear)
    return max((each.weight.numel() for each in linear), default=0) * dtype.itemsize


def reads_ahead(
    sizes: Mapping[str, int], free: int, where: str = "memory", *, again: bool = False
) -> bool:
    """Say whether the next stage can be read while one computes.

    ``sizes`` are bytes by stage in running order, ``free`` what may be taken; ``again`` says that
    the first stage comes after the last, for another token. Raises UserError, saying how much is
    needed, where one stage alone does not fit.
    """
    largest = max(sizes, key=lambda stage: sizes[stage])
    if sizes[largest] > free:
        raise UserError(
            f"{largest} alone needs {bytes_text(sizes[largest])} for its weights, and {where} has "
            f"{bytes_text(free)} left",
            "raise the limit (max_memory=, ulimit, container) to at "
            "least that, or leave that stage out with scope=.",
        )
    return most_at_once(sizes, again) <= free


def most_at_once(sizes: Mapping[str, int], again: bool = False) -> int:
    """Return the bytes of the two neighbouring stages that are largest together."""
    return sum(sizes[stage] for stage in largest_together(sizes, again))


def largest_together(sizes: Mapping[str, int], again: bool = False) -> tuple[str, ...]:
    """Return the two neighbouring stages that are largest together, or the only stage there is."""
    order = list(sizes)
    pairs = pairwise([*order, *order[:1]] if again else order)
    return max(pairs, key=lambda pair: sum(sizes[stage] for stage in pair), default=tuple(order))


def stream_text(sizes: Mapping[str, int], ahead: bool, again: bool = False) -> str:
    """Return how the stages, by their bytes, stream, for the user."""
    total = bytes_text(sum(sizes.values()))
    if ahead:
        two = bytes_text(most_at_once(sizes, again))
        how = f"at most two in memory, {two}; the next is read ahead"
    else:
        how = f"one in memory, at most {bytes_text(max(sizes.values()))}; nothing is read ahead"
    return f"streaming {len(sizes)} stages ({total}): {how}."
