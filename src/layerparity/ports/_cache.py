"""Cache: transformers' static cache, and what the host knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerparity.errors import UserError
from layerparity.models.skeleton import Skeleton
from layerparity.ports.base import Call

if TYPE_CHECKING:
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
