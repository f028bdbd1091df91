"""Initialise the distributed environment once, before any component, and tear it down once.

Neuron's modules refuse to be built outside a distributed environment, even in a single process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.machine import neuron_packages

if TYPE_CHECKING:
    from layerparity.backends.neuron.runtime import Runtime

_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12355"}
# torch waits half an hour by default; ranks of one launcher start within minutes or not at all.
_PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Grant:
    """The place of this process among the ranks, and the tensor parallel degree it really has."""

    rank: int
    world_size: int
    tp_degree: int


@dataclass
class _Environment:
    """What `initialise` made, so that `teardown` removes that and nothing else."""

    asked: int
    granted: Grant
    holders: int = 1
    own_group: bool = False
    parallel: Any = None
    variables: list[str] = field(default_factory=list)


_current: _Environment | None = None


def initialise(runtime: Runtime) -> Grant:
    """Make torch.distributed and neuronx_distributed ready for the runtime's degree; idempotent.

    A launcher's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are used where they are set. Raises
    UserError where the ranks or the degree granted are not those asked for.
    """
    global _current  # noqa: PLW0603
    if _current is not None:
        if _current.asked != runtime.tp_degree:
            raise UserError(
                f"The distributed environment is initialised with tp_degree={_current.asked}, and "
                f"tp_degree={runtime.tp_degree} was asked",
                "run each degree as a command of its own.",
            )
        _current.holders += 1
        return _current.granted
    rank, world_size = ranks(os.environ)
    if world_size > 1 and runtime.why_alone:
        raise UserError(
            f"WORLD_SIZE={world_size}, but {runtime.why_alone}",
            f"start without torchrun, with tp_degree={world_size}.",
        )
    environment = _Environment(runtime.tp_degree, Grant(rank, world_size, 1))
    environment.variables = [name for name in _DEFAULTS if name not in os.environ]
    try:
        os.environ.update({name: _DEFAULTS[name] for name in environment.variables})
        if runtime.process_group is not None:
            _join(environment, runtime.process_group)
        environment.granted = Grant(rank, world_size, _degree(runtime, environment))
    except BaseException:
        _undo(environment)
        raise
    _current = environment
    return environment.granted


def teardown() -> None:
    """Undo one `initialise`; the last one removes what was made. Safe to call too often."""
    global _current  # noqa: PLW0603
    if _current is None:
        return
    _current.holders -= 1
    if _current.holders == 0:
        _undo(_current)
        _current = None


def check_collectives(runtime: Runtime) -> None:
    """Refuse, once the device is taken, a world in which device collectives do nothing."""
    if _current is None or runtime.process_group is None:
        return
    reach, world_size = runtime.world_size(), _current.granted.world_size
    if reach != world_size:
        raise UserError(
            f"Device collectives reach {reach} of {world_size} ranks and would silently do nothing",
            "check NEURON_RT_VISIBLE_CORES, and start with torchrun, one rank per core.",
        )


def ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, world size) from a launcher's variables. Raises UserError for nonsense."""
    values = {**_DEFAULTS, **environment}
    try:
        rank, world_size = int(values["RANK"]), int(values["WORLD_SIZE"])
    except ValueError as error:
        raise UserError(
            "RANK and WORLD_SIZE must be whole numbers", "start with torchrun."
        ) from error
    if world_size > 1 and "RANK" not in environment:
        raise UserError(
            f"WORLD_SIZE={world_size} without RANK", "start with torchrun, or unset it."
        )
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} is not below WORLD_SIZE={world_size}", "start with torchrun.")
    return rank, world_size


def _join(environment: _Environment, group: str) -> None:
    """Join the process group, or adopt the one somebody else made."""
    import torch.distributed as dist

    rank, world_size = environment.granted.rank, environment.granted.world_size
    # Somebody else's group is used, and left when the run ends.
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise UserError(
                f"torch.distributed is already initialised with {dist.get_world_size()} ranks, "
                f"not {world_size}",
                "call torch.distributed.destroy_process_group() first.",
            )
        return
    # Alone, a store in memory will do: no port, so that two runs on one machine never collide.
    store = dist.HashStore() if world_size == 1 else None
    try:
        dist.init_process_group(
            group, store=store, rank=rank, world_size=world_size, timeout=_PATIENCE
        )
    except (RuntimeError, ValueError, KeyError) as error:
        if group in str(error).lower() and isinstance(error, KeyError | ValueError):
            raise UserError(
                f"torch.distributed has no '{group}' backend",
                "install the packages that fit torch.",
            ) from error
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"Rank {rank} of {world_size} could not join the others at {where} "
            f"({str(error).splitlines()[0]})",
            "check that every rank was started and the port is free.",
        ) from error
    environment.own_group = True


def _degree(runtime: Runtime, environment: _Environment) -> int:
    """Return the degree granted. neuronx_distributed lowers it to the world size, silently."""
    asked = runtime.tp_degree
    # No ranks: the runtime compares the degree with its own devices.
    if runtime.process_group is None:
        return asked
    state = neuron_packages.parallel_state() if runtime.is_neuron else None
    if state is not None and not state.ready:
        state.initialise(asked)
        environment.parallel = state
    granted = 1 if state is None else state.tp_degree
    if granted != asked:
        cure = (
            f"start with torchrun --nproc_per_node={asked}"
            if state is not None
            else "install neuronx-distributed from AWS's own index"
        )
        raise UserError(
            f"tp_degree={asked} was asked and {granted} granted, with "
            f"{environment.granted.world_size} rank(s)",
            f"{cure}, or use tp_degree={granted}.",
        )
    return granted


def _undo(environment: _Environment) -> None:
    if environment.parallel is not None:
        # NxD's groups are made of torch's, so they go first.
        environment.parallel.destroy()
    if environment.own_group:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    for name in environment.variables:
        os.environ.pop(name, None)
