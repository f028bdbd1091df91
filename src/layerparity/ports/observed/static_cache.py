"""transformers' static cache on a device, and its twin on the host.

A block that keeps a state in place of keys and values (mamba, short convolution, linear attention)
has one of a fixed size: it is static by itself.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.model.skeleton import Skeleton
from layerparity.ports.base import Call
from layerparity.ports.observed.canonical import newest

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache

    from layerparity.backends.base import Backend

_COUNT = "cumulative_length"
# transformers' kinds of keys and values that count their tokens, and of what needs no count.
_KEYS_AND_VALUES = ("StaticLayer", "StaticSlidingWindowLayer")
_STATES = "LinearAttention"
_NOTHING = "DummyLayer"
# What holds a slot for each token, in caches that do not slide.
_SLOTS = ("keys", "values", "indexer_keys")


class HfCache:
    """transformers' static cache on the device, and a host-side twin that only counts tokens."""

    def __init__(self, skeleton: Skeleton, max_tokens: int) -> None:
        self.device = _cache(skeleton, max_tokens)
        # What takes tokens back in place of `taking_back`, by layer: a mistake's own.
        self.taken_back: dict[int, Callable[[], Callable[[], None]]] = {}
        self.host = _cache(skeleton, max_tokens)
        for layer in self.host.layers:
            kind = type(layer).__name__
            if not (hasattr(layer, _COUNT) or kind.startswith(_STATES) or kind == _NOTHING):
                raise UserError(
                    f"{skeleton.config.model_type} has blocks whose cache transformers calls "
                    f"{kind}, which is not static: leave generate.max_new_tokens out."
                )

    def seen(self, call: Call) -> Cache:
        """Return the host's twin as it stands before a pass, which its masks are made from.

        Every block counts as cached what was seen before, whether or not the scope has it.
        """
        import torch

        before = int(call.attention_mask.shape[-1]) - call.tokens
        for twin in self.host.layers:
            if hasattr(twin, _COUNT):
                twin.cumulative_length = torch.tensor(before)
                # A sliding window counts here, and beyond its own length.
                twin.cumulative_length_int = before
                twin.is_initialized = before > 0
            if hasattr(twin, "has_previous_state"):
                twin.has_previous_state = dict.fromkeys(twin.has_previous_state, before > 0)
        return self.host

    def layer(self, number: int) -> Any:
        """Return what is cached of a block; None of one that takes another's keys and values."""
        layers = self.device.layers
        return layers[number] if number < len(layers) else None

    def newest(
        self, layer: int, call: Call, send: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return keys and values [batch, head, token, channel] that a pass just put in at a block.

        ``send`` moves a tensor to where the block's are. Empty where nothing was put in, None for a
        kind of cache that holds more than these.
        """
        import torch

        kept = self.layer(layer)
        if kept is None or type(kept).__name__ == _NOTHING:
            return {}
        if type(kept).__name__ not in _KEYS_AND_VALUES:
            return None
        if not kept.is_initialized:
            return {}
        rows = newest(call, kept.max_cache_len)
        places = send(torch.arange(rows.start, rows.stop))
        parts = {"keys": kept.keys, "values": kept.values}
        return {name: part.index_select(2, places) for name, part in parts.items()}

    def rows(self, layer: int, call: Call) -> dict[str, torch.Tensor]:
        """Return what a block's cache holds after a pass, on the CPU, by what it is.

        Keys and values are [batch, token, head, channel], of all tokens that were seen, or of the
        last ones that a window keeps; states are [batch, ...].
        """
        import torch

        kept, seen = self.layer(layer), int(call.attention_mask.shape[-1])
        named = {"keys": getattr(kept, "keys", None), "values": getattr(kept, "values", None)}
        found = {
            n: each[:, :, :seen].transpose(1, 2) for n, each in named.items() if each is not None
        }
        for name in ("conv_states", "recurrent_states"):
            for index, value in (getattr(kept, name, None) or {}).items():
                found[f"{name.replace('_', ' ')} {index}"] = value
        found["state"] = self.device.states.get(layer)
        held = {n: each for n, each in found.items() if isinstance(each, torch.Tensor)}
        return {name: each.detach().cpu().clone() for name, each in held.items()}

    def taking_back(self, layer: int | None, backend: Backend) -> Callable[[], None]:
        """Return what makes a block's cache on a backend what it is now, after more was put in."""
        if layer is None:
            return lambda: None
        held = self.taken_back.get(layer, partial(self.held, layer))()

        def take_back() -> None:
            held()
            # Lazy operations would become part of the next stage's graph.
            backend.fetch({})

        return take_back

    def held(self, layer: int) -> Callable[[], None]:
        """Return what puts a block's cache back, but slots behind those that are counted."""
        kept, states = self.layer(layer), self.device.states
        slots = () if getattr(kept, "is_sliding", False) else _SLOTS
        known = {} if kept is None else vars(kept)
        held = {name: _copied(each) for name, each in known.items() if name not in slots}
        state = _copied(states.get(layer))

        def put_back() -> None:
            for name, value in held.items():
                _put(known, name, value)
            if state is not None:
                _put(states, layer, state)

        return put_back


def _copied(value: object) -> object:
    """Return a copy of tensors, of those in dictionaries, and of what is no tensor, as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value


def _put(owner: MutableMapping[Any, Any], name: object, value: object) -> None:
    """Put a copy back, a tensor in place: graphs hold its address."""
    import torch

    if isinstance(value, torch.Tensor) and owner[name].shape == value.shape:
        owner[name].copy_(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            _put(owner[name], key, each)
    else:
        owner[name] = value


def _cache(skeleton: Skeleton, max_tokens: int) -> Any:
    """Return an empty static cache for a model's blocks. Raises UserError where there is none."""
    from transformers import StaticCache

    class StatesCache(StaticCache):
        """A static cache that also holds what MiniMax keeps of its linear attention, by block."""

        def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
            """Return a block's state, [batch, head, channel, channel]; None before the prefill."""
            state: torch.Tensor | None = self.states.get(layer_idx)
            return state

        def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
            """Keep a block's state, [batch, head, channel, channel]."""
            self.states[layer_idx] = linear_cache

    try:
        cache = StatesCache(config=skeleton.config, max_cache_len=max_tokens)
    except KeyError as error:
        raise UserError(
            f"{skeleton.config.model_type} has blocks of type {error}, for which transformers has "
            "no static cache: leave generate.max_new_tokens out."
        ) from error
    cache.states = {}
    return cache
