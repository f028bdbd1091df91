"""Plan which stage goes on which device, by accelerate's own planner, without any device.

accelerate plans over a stand-in on the meta device: one module for each stage that runs, as large
as the stage's weights. So a range of a model takes only the range's bytes, and eight pretended GPUs
are planned in milliseconds on a machine without one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from layerparity.ground.errors import UserError
from layerparity.machine.device import Placed
from layerparity.machine.max_memory import SPREAD, size_text


def stage_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of a stage's weights once its floating tensors are stored as ``dtype``."""
    return sum(
        tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)
        for tensor in module.state_dict().values()
    )


def plan_devices(
    sizes: Mapping[str, int],
    strategy: str,
    memory: Mapping[int | str, int],
    blocks: Collection[str] = (),
) -> dict[str, str]:
    """Return the device of each stage: ``cuda:N``, ``cpu`` or ``disk``.

    ``sizes`` are bytes by stage, in running order; ``memory`` is what `budget` returns; ``blocks``
    are the stages that the model's ``_no_split_modules`` names, by which accelerate balances.
    Raises UserError, saying how much is needed, where ``memory`` cannot run the stages.
    """
    if strategy not in SPREAD:
        chosen = dict.fromkeys(sizes, strategy)
    else:
        chosen = _spread(sizes, strategy, memory, blocks)
    _check_room(sizes, chosen, memory)
    return chosen


def execution_device(device: str, memory: Mapping[int | str, int]) -> str:
    """Return where a stage runs whose weights are on ``device``."""
    if device.startswith("cuda"):
        return device
    # The first GPU is where accelerate keeps room for the largest stage that waits elsewhere.
    first = min((key for key in memory if isinstance(key, int)), default=None)
    return "cpu" if first is None else f"cuda:{first}"


def placement(sizes: Mapping[str, int], chosen: Mapping[str, str]) -> list[Placed]:
    """Return one line for each device in use, in the order in which stages reach it."""
    rows = []
    for device in dict.fromkeys(chosen.values()):
        stages = tuple(stage for stage, its in chosen.items() if its == device)
        rows.append(Placed(device, stages, sum(sizes[stage] for stage in stages)))
    return rows


def _spread(
    sizes: Mapping[str, int],
    strategy: str,
    memory: Mapping[int | str, int],
    blocks: Collection[str],
) -> dict[str, str]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    gpus = sorted(key for key in memory if isinstance(key, int))
    # accelerate's low_zero counts GPUs from 0 without a gap, so it is given such numbers.
    limits: dict[int | str, Any] = {place: memory[gpu] for place, gpu in enumerate(gpus)}
    limits["cpu"] = memory.get("cpu", 0)
    model, no_split = _stand_in(sizes, blocks)
    low_zero = strategy == "balanced_low_0" and 0 in gpus
    with _quiet():
        if strategy != "sequential":
            limits = get_balanced_memory(model, limits, no_split, low_zero=low_zero)
        plan = infer_auto_device_map(model, limits, no_split, clean_result=False)
    devices = [plan[f"stage_{place}"] for place in range(len(sizes))]
    named = (f"cuda:{gpus[its]}" if isinstance(its, int) else str(its) for its in devices)
    return dict(zip(sizes, named, strict=True))


def _stand_in(sizes: Mapping[str, int], blocks: Collection[str]) -> tuple[nn.Module, list[str]]:
    """Return a meta model of one childless module a stage, and the class names of the blocks.

    accelerate asks the size of one module of each class, so each size is a class of its own.
    """
    model, no_split = nn.Module(), set()
    for place, (stage, size) in enumerate(sizes.items()):
        kind = f"Block{size}" if stage in blocks else "Stage"
        module: nn.Module = type(kind, (nn.Module,), {})()
        weights = torch.empty(size, dtype=torch.int8, device="meta")
        module.register_parameter("weights", nn.Parameter(weights, requires_grad=False))
        model.add_module(f"stage_{place}", module)
        if stage in blocks:
            no_split.add(kind)
    return model, sorted(no_split)


def _check_room(
    sizes: Mapping[str, int], chosen: Mapping[str, str], memory: Mapping[int | str, int]
) -> None:
    used: dict[str, int] = {}
    for stage, device in chosen.items():
        used[device] = used.get(device, 0) + sizes[stage]
    limits = {f"cuda:{key}" if isinstance(key, int) else key: memory[key] for key in memory}
    for device, size in used.items():
        if device != "disk" and size > limits[device]:
            raise UserError(
                f"The weights need {size_text(size)} on {device}, which may hold "
                f"{size_text(limits[device])}",
                "raise max_memory, or use device_map=auto, which puts the rest elsewhere.",
            )
    for stage, device in chosen.items():
        runs_on = execution_device(device, memory)
        if runs_on != device and sizes[stage] > limits[runs_on]:
            raise UserError(
                f"{stage} alone needs {size_text(sizes[stage])} on {runs_on} while it runs, which "
                f"may hold {size_text(limits[runs_on])}",
                "raise its max_memory to at least that.",
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence accelerate's "Device 0 is not available": pretended devices never are."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
