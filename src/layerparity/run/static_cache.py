"""transformers' static cache on a device, and its twin on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.model.skeleton import Skeleton
from layerparity.run.ports._canonical import newest
from layerparity.run.ports.base import Call

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache


class HfCache:
    """transformers' static cache on the device, and a host-side twin that only counts tokens."""

    def __init__(self, skeleton: Skeleton, max_tokens: int) -> None:
        from transformers import StaticCache

        self.device: Cache = StaticCache(config=skeleton.config, max_cache_len=max_tokens)
        self.host: Cache = StaticCache(config=skeleton.config, max_cache_len=max_tokens)
        if not all(hasattr(layer, "cumulative_length") for layer in self.host.layers):
            raise UserError(
                f"{skeleton.config.model_type} has blocks that keep no keys and values, and no "
                "static cache for them: leave generate.max_new_tokens out."
            )

    def seen(self, call: Call) -> Cache:
        """Return the host's twin as it stands before a pass, which its masks are made from.

        Every block counts as cached what was seen before, whether or not the scope has it.
        """
        import torch

        before = int(call.attention_mask.shape[-1]) - call.tokens
        for twin in self.host.layers:
            twin.cumulative_length = torch.tensor(before)
            # A sliding window counts here, and beyond its own length.
            twin.cumulative_length_int = before
            twin.is_initialized = before > 0
        return self.host

    def newest(
        self, layer: int, call: Call, send: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return keys and values [batch, head, token, channel] that a pass just put in at a block.

        ``send`` moves a tensor to where the block's are. Empty where nothing was put in, None for a
        kind of cache that holds more than these.
        """
        import torch

        kept: Any = self.device.layers[layer]
        if not kept.is_initialized:
            return {}
        if type(kept).__name__ not in ("StaticLayer", "StaticSlidingWindowLayer"):
            return None
        rows = newest(call, kept.max_cache_len)
        places = send(torch.arange(rows.start, rows.stop))
        parts = {"keys": kept.keys, "values": kept.values}
        return {name: part.index_select(2, places) for name, part in parts.items()}
