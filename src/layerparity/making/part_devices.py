"""Accelerators of its own for each process that runs parts of a sweep beside others on a machine.

Without them every part would take the same GPU, or all Neuron cores, which one process alone can
hold. The runtimes read which they may take once, from a variable, and keep them to the process's
end; so does a process here, by a lock that the system gives back however the process ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.machine import nvidia
from layerparity.making import endings
from layerparity.ports.opening import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_SLURM = "SLURM_JOB_ID"
# What the command itself was shown of GPUs; not set where it was shown all.
_SHOWN = "LAYERPARITY_CUDA_VISIBLE_DEVICES"
_POLL_SECONDS = 0.5
# What this process holds, by variable: numbers of devices, and the open files that lock them.
_held: dict[str, tuple[list[str], list[int]]] = {}


def keep_shown() -> None:
    """Tell the processes of a sweep which GPUs its command was shown.

    The local launcher of submitit shows its processes none, where nobody typed how many.
    """
    os.environ.pop(_SHOWN, None)
    if nvidia.VISIBLE in os.environ:
        os.environ[_SHOWN] = os.environ[nvidia.VISIBLE]


def take(config: Config) -> None:
    """Show this process only devices that no other process of its sweep takes, and hold them.

    Nothing changes in a sweep of one process, on Slurm, which gives out devices itself, and where
    the backend takes no particular devices or wants more than there are, which it says itself.
    Waits while others hold all of them. Raises UserError where a part wants more than its process
    took for an earlier part.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") == "local" and not os.environ.get(nvidia.VISIBLE):
        os.environ.pop(nvidia.VISIBLE, None)
        if _SHOWN in os.environ:
            os.environ[nvidia.VISIBLE] = os.environ[_SHOWN]
    folder, share = endings.folder_of_others(), open_backend.abilities(config).share
    asked = share(config) if share and folder and _SLURM not in os.environ else None
    if folder is None or asked is None:
        return
    if asked.variable in _held:
        held = _held[asked.variable][0]
        if asked.count > len(held):
            raise UserError(
                f"This part wants {asked.count} devices, and its process took {len(held)} "
                f"({asked.variable}={','.join(held)}) for an earlier part",
                "use hydra/launcher=submitit_local, whose parts are processes of their own.",
            )
        return
    # Whole groups, as wide as this part: the cores of one collective must lie beside each other.
    starts = range(0, len(asked.devices) - asked.count + 1, asked.count)
    groups = [asked.devices[at : at + asked.count] for at in starts]
    if not groups:
        return
    folder.mkdir(parents=True, exist_ok=True)
    taken = _first_free(folder, asked.variable, groups)
    if taken is None:
        console.note(f"waits until another part gives back {asked.variable}")
    while taken is None:
        time.sleep(_POLL_SECONDS)
        taken = _first_free(folder, asked.variable, groups)
    _held[asked.variable] = taken
    os.environ[asked.variable] = ",".join(taken[0])


def _first_free(
    folder: Path, variable: str, groups: list[list[str]]
) -> tuple[list[str], list[int]] | None:
    """Lock the first group of devices that nobody holds; return it with its locks, or None."""
    # A folder may be shared by machines.
    named = f"{socket.gethostname()}-{variable}"
    for group in groups:
        locks: list[int] = []
        with suppress(BlockingIOError):
            for device in group:
                locks.append(os.open(folder / f"{named}-{device}.lock", os.O_RDWR | os.O_CREAT))
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return group, locks
        for lock in locks:
            os.close(lock)
    return None
