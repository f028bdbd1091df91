"""Record what a model passes to each of its blocks beside the hidden states.

Masks, position ids and rotary tables differ by family. Instead of rebuilding them, the decoder's
own forward runs once on the host with every block replaced by a stub that notes what it was given.
"""

from __future__ import annotations

import copy
import inspect
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import EMBEDDING
from layerparity.model.buffers import fill_buffers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers.cache_utils import Cache

    from layerparity.model.skeleton import Skeleton


# What blocks call a bias by the distance of two tokens, and a configuration whether there is one.
_BIAS = "alibi"
# What blocks call the cache they are given.
CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
# How their names begin for what others hand on: what all share, what the one before returns, and a
# slice of what the embedding makes for each.
SHARED, PREVIOUS, PER_LAYER = "shared_", "prev_", "per_layer_"


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
    seen; the arguments never hold it, nor what other blocks hand on. ``dtype`` is what the blocks
    compute in, where that is not the skeleton's.
    """
    import torch

    batch, tokens = position_ids.shape
    hidden = torch.zeros(batch, tokens, skeleton.config.hidden_size, dtype=dtype or skeleton.dtype)
    decoder, stubs = _stubbed(skeleton, hidden)
    several = skeleton.embedding
    # What the embedding makes beside the state, it makes of ids.
    ids = several is not None and several.hands != ""
    given = {
        **({"input_ids": torch.zeros_like(position_ids)} if ids else {"inputs_embeds": hidden}),
        "attention_mask": _with_room(skeleton, attention_mask, past),
        "position_ids": position_ids,
        # A decoder whose class of cache is its own takes another where it need not make one.
        "use_cache": False,
    }
    taken = inspect.signature(decoder.forward).parameters
    given[next((name for name in CACHE_NAMES if name in taken), CACHE_NAMES[0])] = past
    with torch.no_grad():
        # Some decoders take the first of what a block returns, some the state and the weights.
        for returns in (0, 1, 2):
            for stub in stubs:
                stub.returns = returns
            try:
                decoder(**given)
                break
            except (IndexError, ValueError):
                if returns == 2:
                    raise
    dropped = (*CACHE_NAMES, "use_cache")
    # Blocks that take keys and values of others have no layer in a cache, and are the last ones.
    layers = [] if past is None else past.layers
    return [
        {
            name: _own(value, layer, tokens)
            for name, value in stub.seen.items()
            if name not in dropped and not is_handed(name)
        }
        for stub, layer in zip_longest(stubs, layers)
    ]


def taken(module: nn.Module) -> tuple[str, ...]:
    """Return what a module's forward takes of other stages, as its arguments are called."""
    return tuple(n for n in inspect.signature(module.forward).parameters if is_handed(n))


def is_handed(argument: str) -> bool:
    """Say whether an argument of a block is what other stages hand on."""
    return argument.startswith((SHARED, PREVIOUS, PER_LAYER))


def _with_room(skeleton: Skeleton, mask: torch.Tensor, past: Cache | None) -> torch.Tensor:
    """Return a mask [batch, seen] as long as a cache of a fixed size, where a bias is made of it.

    The empty places are padding, as transformers' generation has it. Other decoders lengthen their
    masks themselves.
    """
    import torch

    layer: Any = skeleton.blocks[0]
    biased = _BIAS in inspect.signature(layer.forward).parameters
    if past is None or not (biased and getattr(skeleton.config, _BIAS, True)):
        return mask
    room = max(getattr(each, "max_cache_len", 0) for each in past.layers)
    return torch.nn.functional.pad(mask, (0, max(room - mask.shape[-1], 0)))


def _own(value: Any, cached: Any, tokens: int) -> Any:
    """Return an argument of a block; of a mask of padding, [batch, seen], what is of this pass.

    A block that keeps a state has no use for the rest, which transformers' generation leaves out.
    """
    import torch

    padding = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] > tokens
    return value[:, -tokens:] if padding and hasattr(cached, "has_previous_state") else value


def _stubbed(skeleton: Skeleton, hidden: torch.Tensor) -> tuple[nn.Module, list[Any]]:
    """Return a shallow copy of the decoder whose blocks are stubs and whose tables are real.

    Modules of the embedding give out ``hidden`` [batch, token, channel], whatever they are given.
    """
    from torch import nn

    base, layout = skeleton.base, skeleton.layout
    decoder = copy.copy(base)
    decoder._modules = dict(base._modules)
    stubs = [_stub(layer) for layer in skeleton.blocks]
    decoder._modules[layout.blocks] = nn.ModuleList(stubs)
    decoder._modules[layout.norm] = nn.Identity()
    several = skeleton.embedding
    parts = [skeleton.module(EMBEDDING)] if several is None else several.of_the_state
    for name, child in base.named_children():
        if child is skeleton.blocks or name == layout.norm:
            continue
        if child in parts:
            decoder._modules[name] = _giving(hidden)
        elif several is not None and child in several.modules_in_order:
            # What it makes beside the state is handed on by itself, and may be very wide.
            decoder._modules[name] = _hollow(child, hidden)
        elif any(True for _ in child.parameters()):
            # Of no stage: not read here, and of use to the hidden states alone.
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


def _hollow(child: nn.Module, hidden: torch.Tensor) -> nn.Module:
    """Return a module without weights whose outputs are as wide as a table's or projection's.

    They are 0, in the type of ``hidden`` [batch, token, channel]; another module changes nothing.
    """
    from torch import nn

    width = getattr(child, "embedding_dim", getattr(child, "out_features", 0))
    return _giving(hidden.new_zeros(*hidden.shape[:2], width)) if width else nn.Identity()


def _giving(hidden: torch.Tensor) -> nn.Module:
    """Return a module whose output is ``hidden``."""
    from torch import nn

    class Gives(nn.Module):
        def forward(self, *_: Any, **__: Any) -> Any:
            return hidden

    return Gives()


def _stub(layer: nn.Module) -> Any:
    from torch import nn

    class Stub(nn.Module):
        seen: dict[str, Any]
        # How many values a block gives out in a tuple, none of which is a weight; 0: no tuple.
        returns = 0

        def __getattr__(self, name: str) -> Any:
            # Some decoders ask a block what kind it is (attention_type) to choose its mask.
            return super().__getattr__(name) if name in ("training",) else getattr(layer, name)

        def forward(self, hidden_states: Any, *unnamed: Any, **arguments: Any) -> Any:
            names = [*inspect.signature(layer.forward).parameters][1:]
            self.seen = dict(zip(names, unnamed, strict=False)) | arguments
            beside = (None,) * (self.returns - 1)
            return (hidden_states, *beside) if self.returns else hidden_states

    return Stub()
