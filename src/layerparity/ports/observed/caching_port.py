"""What a port does with transformers' cache: make it, read it, fill it anew, take tokens back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Place
from layerparity.ports.base import Assets, Call, Port
from layerparity.ports.observed.static_cache import HfCache

if TYPE_CHECKING:
    import torch

    from layerparity.model.skeleton import Skeleton


class CachingPort(Port):
    """A port whose blocks keep what they keep in an `HfCache`."""

    assets: Assets
    skeleton: Skeleton
    _call: Call | None

    def new_cache(self, batch: int, max_tokens: int) -> HfCache:
        """Return transformers' static cache with a host-side twin that only counts."""
        return HfCache(self.skeleton, max_tokens)

    def cached(self, stage: str) -> dict[str, torch.Tensor] | None:
        """Return keys and values [batch, head, token, channel] that a pass just put in at a stage.

        Empty where the stage keeps none, None for a cache that holds more than these, and where
        stages hand on more than their state.
        """
        place, cache = Place.parse(stage), self.cache
        if self.begun.handed:
            return None
        if cache is None or place.layer is None:
            return {}
        backend = self.assets.backend
        found = cache.newest(place.layer, self.begun, lambda value: backend.send(stage, value))
        return found and backend.fetch(found)

    def cache_rows(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what a block's cache holds, see `HfCache.rows`."""
        layer, cache = Place.parse(stage).layer, self.cache
        if not isinstance(cache, HfCache) or layer is None:
            return {}
        return cache.rows(layer, self.begun)

    def refill(self, stage: str, cached: Mapping[str, torch.Tensor]) -> None:
        """Put keys and values [batch, head, token, channel] into the cache, as the pass did."""
        place, backend = Place.parse(stage), self.assets.backend
        if self.cache is not None and place.layer is not None and cached:
            layer = self.cache.device.layers[place.layer]
            layer.update(*(backend.send(stage, cached[name]) for name in ("keys", "values")))
            # Lazy operations would become part of the next stage's graph.
            backend.fetch({})

    def taking_back(self, stage: str) -> Callable[[], None]:
        """Return what makes the cache, at a stage, what it is now, after more was put in."""
        if not isinstance(self.cache, HfCache):
            return super().taking_back(stage)
        return self.cache.taking_back(Place.parse(stage).layer, self.assets.backend)

    @property
    def begun(self) -> Call:
        """The pass that was begun."""
        assert self._call is not None, "begin() comes before run()"
        return self._call

    @property
    def cache(self) -> HfCache | None:
        """The cache of the pass that was begun, or None."""
        return self._call.cache if self._call is not None else None
