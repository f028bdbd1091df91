"""A device that torch calls ``neuron``, made in Python: each tensor stands for one on the CPU.

It is torch's own slot for another maker's device, as AWS's is. An operation that is given tensors
of two devices is refused, as it would be there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "neuron"


# The values of a tensor by its storage, which what is detached shares. All are kept: tests are
# small, and a storage that is gone would give its address to another.
_HOSTS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def wrapped(host: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device that stands for one on the CPU, of any shape and dtype."""
    made: torch.Tensor = torch._C._acc.create_empty_tensor(host.shape, host.dtype)
    _HOSTS[made.untyped_storage()._cdata] = made, host
    return made


def host_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU that stands behind one of the device, of the same shape.

    Torch makes some views without asking the device. What it makes empty, to be filled as ``out=``,
    has the shape that it was filled with.
    """
    host = _HOSTS[tensor.untyped_storage()._cdata][1]
    is_view = host.shape != tensor.shape and host.numel() == tensor.numel()
    return host.reshape(tensor.shape) if is_view else host


class Module:
    """``torch.neuron``."""

    synchronised = 0

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Draw nothing: the device has no random numbers."""

    @classmethod
    def synchronize(cls, device: Any = None) -> None:
        cls.synchronised += 1


def _on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the tensors behind those of the device, and give back such tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    behind: dict[int, torch.Tensor] = {}
    held: list[torch.Tensor] = []

    def lower(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device.type == NAME:
            host = host_of(leaf)
            behind[id(host)] = leaf
            held.append(host)
            return host
        if leaf.dim():
            raise RuntimeError(
                f"{op}: all tensors are to be on {NAME}, and one is on {leaf.device}"
            )
        return leaf

    given, named = pytree.tree_unflatten([lower(each) for each in leaves], spec)
    if op is torch.ops.aten.view.default:
        # A tensor of the device is contiguous, whatever stands behind it.
        op = torch.ops.aten.reshape.default
    if op is torch.ops.aten.as_strided.default and not _is_plain(given[0]):
        given = (given[0].clone(memory_format=torch.contiguous_format), *given[1:])
    result = op(*given, **named)

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return behind[id(leaf)] if id(leaf) in behind else wrapped(leaf)

    return pytree.tree_map(lift, result)


def _is_plain(host: torch.Tensor) -> bool:
    return host.is_contiguous() and host.storage_offset() == 0


def register() -> None:
    """Make the device known, once in a process."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module)
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(_on_host, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")

    def copied(source: Any, target: Any, non_blocking: bool = False) -> Any:
        to, of = (host_of(e) if e.device.type == NAME else e for e in (target, source))
        to.copy_(of)
        return target

    aten.impl("_copy_from", copied, "PrivateUse1")
    register.kept = (anything, aten)  # type: ignore[attr-defined]
