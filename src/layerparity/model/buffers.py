"""Fill the buffers that a constructor computes and no checkpoint stores: rotary frequencies, say.

They are lost on the meta device. transformers' own initialisation fills them again, module by
module, as it does after it has loaded a model; a test pins what is used of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.machine.memory import free_host_memory

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

# What no initialisation would leave: a buffer that still holds it was not filled.
_UNFILLED = -(2**31) + 1
# No model has so many frequencies: a buffer of one axis that is larger is a mistaken size.
_MOST_OF_A_ROW = 1 << 22


def fill_buffers(model: PreTrainedModel, part: nn.Module) -> None:
    """Compute the buffers of ``part``, a module of ``model``, that are on the meta device.

    They stand on the CPU afterwards, in the dtype that transformers gives them. Parameters and
    stored buffers keep their values. Raises UserError where a buffer is not filled.
    """
    import torch

    for owner in list(part.modules()):
        lost = {
            name: buffer
            for name, buffer in owner._buffers.items()
            if name in owner._non_persistent_buffers_set and buffer is not None and buffer.is_meta
        }
        if not lost:
            continue
        for name, buffer in lost.items():
            _refuse_huge(owner, name, buffer)
            whole = _UNFILLED if buffer.dtype in (torch.int32, torch.int64) else 0
            value = float("nan") if buffer.is_floating_point() else whole
            owner._buffers[name] = torch.full_like(buffer, value, device="cpu")
        for tensor in (*owner.parameters(), *owner.buffers()):
            # transformers' initialisation leaves alone what bears this mark.
            tensor._is_hf_initialized = not any(tensor is owner._buffers[name] for name in lost)  # type: ignore[attr-defined]
        with torch.no_grad():
            model._init_weights(owner)
            if any(_unfilled(owner._buffers[name]) for name in lost):
                _init_above(model, owner)
        for name in lost:
            _check(owner, name)


def _refuse_huge(owner: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Raise UserError for a buffer that no model has, as of rotary_dim=1e9, before it is made."""
    row = buffer.dim() < 2
    most = _MOST_OF_A_ROW if row else free_host_memory() // buffer.element_size()
    if buffer.numel() > most:
        raise UserError(
            f"config.json's values give {type(owner).__name__}.{name} the shape "
            f"{list(buffer.shape)}",
            "check them: the rotated part of a head, say, or how many positions there are.",
        )


def tensor_at(model: nn.Module, weight: str) -> torch.Tensor:
    """Return a parameter or buffer of a model by its path, in its own shape and dtype, uncopied."""
    path, _, name = weight.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), name)
    return tensor


def set_tensor(model: nn.Module, weight: str, value: torch.Tensor) -> None:
    """Put a value, of any shape and dtype, in the place of a model's parameter or stored buffer."""
    from torch import nn

    path, _, name = weight.rpartition(".")
    owner = model.get_submodule(path)
    if name in owner._buffers:
        owner._buffers[name] = value
    else:
        owner._parameters[name] = nn.Parameter(value, requires_grad=False)


def _init_above(model: PreTrainedModel, owner: nn.Module) -> None:
    """Let the modules that hold one initialise it: some fill what their blocks keep."""
    own = {id(each) for each in (*owner.parameters(), *owner.buffers())}
    holders = [each for each in model.modules() if any(part is owner for part in each.modules())]
    for holder in (each for each in holders if each is not owner):
        for tensor in (*holder.parameters(), *holder.buffers()):
            if id(tensor) not in own:
                tensor._is_hf_initialized = True
        model._init_weights(holder)


def _unfilled(value: torch.Tensor | None) -> bool:
    """Say whether an initialisation left a buffer, or a part of it, as it was marked."""
    import torch

    assert value is not None
    marked = torch.isnan(value) if value.is_floating_point() else value == _UNFILLED
    return bool(value.numel()) and bool(marked.any())


def _check(owner: nn.Module, name: str) -> None:
    """Raise UserError where the initialisation left a buffer as it was marked."""
    if _unfilled(owner._buffers[name]):
        raise UserError(
            f"{type(owner).__name__}.{name} is computed when the model is built and cannot be "
            "computed again: this architecture cannot be run by stages."
        )
