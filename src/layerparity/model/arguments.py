"""Arguments: what a model passes to each of its blocks beside the hidden states.

Masks, position ids and rotary tables differ by family. Instead of rebuilding them, the decoder's
own forward runs once on the host with every block replaced by a stub that notes what it was given.

They are lost on the meta device. transformers' own initialisation fills them again, module by
module, as it does after it has loaded a model; a test pins what is used of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from layerparity.model.skeleton import Skeleton


# What blocks call the cache they are given.
CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")


def block_arguments(
    skeleton: Skeleton,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    past: Cache | None = None,
    dtype: torch.dtype | None = None,
) -> list[dict[str, Any]]:
    """Return the keyword arguments of every block, on the CPU.

    ``attention_mask`` is [batch, seen tokens] with 1 for real tokens; ``position_ids`` is
    [batch, token]. ``past`` is a host-side stand-in for the cache that says how many tokens were
    seen; the arguments never hold it. ``dtype`` is what the blocks compute in, where that is not
    the skeleton's.
    """
    import torch

    batch, tokens = position_ids.shape
    decoder, stubs = _stubbed(skeleton)
    hidden = torch.zeros(batch, tokens, skeleton.config.hidden_size, dtype=dtype or skeleton.dtype)
    with torch.no_grad():
        decoder(
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past,
            use_cache=past is not None,
        )
    return [_without_cache(stub.seen) for stub in stubs]


def _stubbed(skeleton: Skeleton) -> tuple[nn.Module, list[Any]]:
    """Return a shallow copy of the decoder whose blocks are stubs and whose tables are real."""
    from torch import nn

    base, layout = skeleton.base, skeleton.layout
    decoder = copy.copy(base)
    decoder._modules = dict(base._modules)
    stubs = [_stub(layer) for layer in skeleton.blocks]
    decoder._modules[layout.blocks] = nn.ModuleList(stubs)
    decoder._modules[layout.norm] = nn.Identity()
    embedding = skeleton.module("embed_tokens")
    for name, child in base.named_children():
        if child in (skeleton.blocks, embedding) or name == layout.norm:
            continue
        if any(True for _ in child.parameters()):
            # Learned positions: not read here, and of use to the hidden states alone.
            decoder._modules[name] = _zeroed(skeleton, child)
        else:
            # Rotary tables: small, in no checkpoint, and needed on the host.
            fill_buffers(skeleton.model, child)
    return decoder, stubs


def _zeroed(skeleton: Skeleton, child: nn.Module) -> nn.Module:
    """Return a copy of a module on the CPU whose weights are 0."""
    import torch
    from torch import nn

    copied = copy.deepcopy(child)
    for module in copied.modules():
        for name, value in module._parameters.items():
            if value is not None:
                empty = torch.zeros_like(value, device="cpu")
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    fill_buffers(skeleton.model, copied)
    return copied


def _stub(layer: nn.Module) -> Any:
    from torch import nn

    class Stub(nn.Module):
        seen: dict[str, Any]

        def __getattr__(self, name: str) -> Any:
            # Some decoders ask a block what kind it is (attention_type) to choose its mask.
            return super().__getattr__(name) if name in ("training",) else getattr(layer, name)

        def forward(self, hidden_states: Any, *unnamed: Any, **arguments: Any) -> Any:
            names = [*inspect.signature(layer.forward).parameters][1:]
            self.seen = dict(zip(names, unnamed, strict=False)) | arguments
            return hidden_states

    return Stub()


def _without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    dropped = (*CACHE_NAMES, "use_cache")
    return {key: value for key, value in arguments.items() if key not in dropped}


# What no initialisation would leave: a buffer that still holds it was not filled.
_UNFILLED = -(2**31) + 1


def fill_buffers(model: PreTrainedModel, part: nn.Module) -> None:
    """Compute the buffers of ``part``, a module of ``model``, that are on the meta device.

    They stand on the CPU afterwards, in the dtype that transformers gives them. Parameters and
    stored buffers keep their values. Raises UserError where a buffer is not filled.
    """
    import torch

    for owner in list(part.modules()):
        lost = [name for name, buffer in _unstored(owner) if buffer.is_meta]
        if not lost:
            continue
        for name in lost:
            owner._buffers[name] = _empty(owner._buffers[name])
        for tensor in (*owner.parameters(), *owner.buffers()):
            # transformers' initialisation leaves alone what bears this mark.
            tensor._is_hf_initialized = not any(tensor is owner._buffers[name] for name in lost)  # type: ignore[attr-defined]
        with torch.no_grad():
            model._init_weights(owner)
        for name in lost:
            _check(owner, name)


def tensor_at(model: nn.Module, weight: str) -> torch.Tensor:
    """Return a parameter or buffer of a model by its path."""
    path, _, name = weight.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), name)
    return found


def set_tensor(model: nn.Module, weight: str, value: torch.Tensor) -> None:
    """Put a value in the place of a parameter, or stored buffer, of a model."""
    from torch import nn

    path, _, name = weight.rpartition(".")
    owner = model.get_submodule(path)
    if name in owner._buffers:
        owner._buffers[name] = value
    else:
        owner._parameters[name] = nn.Parameter(value, requires_grad=False)


def _unstored(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in owner._buffers.items():
        if buffer is not None and name in owner._non_persistent_buffers_set:
            yield name, buffer


def _empty(buffer: torch.Tensor | None) -> torch.Tensor:
    import torch

    assert buffer is not None
    value = float("nan") if buffer.is_floating_point() else 0
    if buffer.dtype in (torch.int32, torch.int64):
        value = _UNFILLED
    return torch.full_like(buffer, value, device="cpu")


def _check(owner: nn.Module, name: str) -> None:
    import torch

    value = owner._buffers[name]
    assert value is not None
    floating = value.is_floating_point()
    unfilled = torch.isnan(value).any() if floating else (value == _UNFILLED).any()
    if value.numel() and bool(unfilled):
        raise UserError(
            f"{type(owner).__name__}.{name} is computed when the model is built and cannot be "
            "computed again: this architecture cannot be run by stages."
        )
