"""How well a backend fits this machine, and what goes where on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Affinity:
    """How well a backend fits this machine: 0 cannot run, 1 as a stand-in, 2 the real thing.

    ``found`` is why; what cannot run may have a ``cure``. ``is_absent``: nothing on the
    machine is of the backend, neither a device nor a library, so that nothing of it is broken.
    """

    score: int
    device: str
    found: str
    cure: str = ""
    is_absent: bool = field(default=False, kw_only=True)

    @property
    def reason(self) -> str:
        """Why, with the cure where there is one: ``FOUND: CURE``."""
        return f"{self.found}: {self.cure}" if self.cure else self.found


@dataclass(frozen=True)
class Placed:
    """One line of the placement table: a device, the stages on it, the bytes of their weights."""

    device: str
    stages: tuple[str, ...]
    bytes: int


def keep_torch_xla_out() -> None:
    """Keep accelerate, which transformers imports, from importing torch_xla where it is installed.

    That takes 6 s, prints a warning and adds a root log handler. accelerate reads the variable
    once, when it is imported itself; where that has happened already this does nothing.
    """
    os.environ["USE_TORCH_XLA"] = "0"
