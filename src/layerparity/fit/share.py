"""Share: what one device holds of a model, and whether there is room for it."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.fit.weights import Size


@dataclass(frozen=True)
class Share:
    """What one device holds, in bytes, of its ``capacity``; ``limit`` is the weights' own.

    ``waits``: the stages do not compute here, and are copied elsewhere whenever they run.
    ``copies`` devices hold such a share each. ``at_once`` is 0 where the stages stay; where they
    stream, so many in a row are here at a time, and ``stages`` are the largest of them.
    """

    device: str
    stages: tuple[str, ...]
    size: Size
    cache: int
    activations: int
    capacity: int
    limit: int
    waits: bool = False
    copies: int = 1
    at_once: int = 0

    @property
    def weights(self) -> int:
        """Bytes of parameters and buffers."""
        return self.size.all

    @property
    def headroom(self) -> int:
        """What is left of the capacity; below 0 where it is not enough."""
        return self.capacity - self.weights - self.cache - self.activations

    @property
    def fits(self) -> bool:
        """Whether the stages are where they compute, with room for what they make."""
        return not self.waits and self.headroom >= 0 and self.weights <= self.limit


@dataclass(frozen=True)
class Answer:
    """The shares of all devices in use; none where ``refused`` says why nothing can be placed."""

    shares: tuple[Share, ...]
    refused: str = ""

    @property
    def size(self) -> Size:
        """What all devices together hold."""
        held = (share.size for share in self.shares for _ in range(share.copies))
        return sum(held, Size())

    @property
    def fits(self) -> bool:
        """Whether every share fits."""
        return bool(self.shares) and all(share.fits for share in self.shares)
