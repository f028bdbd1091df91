"""Arguments: what a model passes to each of its blocks beside the hidden states.

Masks, position ids and rotary tables differ by family. Instead of rebuilding them, the decoder's
own forward runs once on the host with every block replaced by a stub that notes what it was given.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers.cache_utils import Cache

    from layerparity.models.skeleton import Skeleton


def block_arguments(
    skeleton: Skeleton,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    past: Cache | None = None,
) -> list[dict[str, Any]]:
    """Return the keyword arguments of every block, on the CPU.

    ``attention_mask`` is [batch, seen tokens] with 1 for real tokens; ``position_ids`` is
    [batch, token]. ``past`` is a host-side stand-in for the cache that says how many tokens were
    seen; the arguments never hold it.
    """
    import torch

    batch, tokens = position_ids.shape
    decoder, stubs = _stubbed(skeleton)
    hidden = torch.zeros(batch, tokens, skeleton.config.hidden_size, dtype=skeleton.dtype)
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

    base = skeleton.base
    decoder = copy.copy(base)
    decoder._modules = dict(base._modules)
    stubs = [_stub(layer) for layer in base.layers]  # type: ignore[union-attr]
    decoder._modules["layers"] = nn.ModuleList(stubs)
    decoder._modules["norm"] = nn.Identity()
    for name, child in base.named_children():
        if name not in ("layers", "norm") and not any(True for _ in child.parameters()):
            # Rotary tables are computed by their constructor and cannot be read from meta.
            decoder._modules[name] = type(child)(config=skeleton.config)
    return decoder, stubs


def _stub(layer: nn.Module) -> Any:
    from torch import nn

    class Stub(nn.Module):
        seen: dict[str, Any]

        def __getattr__(self, name: str) -> Any:
            # Some decoders ask a block what kind it is (attention_type) to choose its mask.
            return super().__getattr__(name) if name in ("training",) else getattr(layer, name)

        def forward(self, hidden_states: Any, **arguments: Any) -> Any:
            self.seen = arguments
            return hidden_states

    return Stub()


def _without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    dropped = ("past_key_values", "past_key_value", "use_cache")
    return {key: value for key, value in arguments.items() if key not in dropped}
