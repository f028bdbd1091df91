"""What a backend says of itself before it is opened; nothing heavy is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerparity.ground import registry

if TYPE_CHECKING:
    from layerparity.backends.base import Abilities, Backend
    from layerparity.machine.device import Affinity
    from layerparity.settings.config import Config

KNOWN = "backends.known"


def affinity_of(name: str) -> Affinity:
    """Return how well a backend fits this machine."""
    affinity: Affinity = registry.load(KNOWN, name).affinity()
    return affinity


def abilities_of(config: Config) -> Abilities:
    """Return what the backend of a configuration can do, whatever port runs on it."""
    abilities: Abilities = registry.load(KNOWN, config.backend.name).abilities(config.backend)
    return abilities


def build(config: Config) -> Backend:
    """Return the backend of a configuration, not yet opened. Raises UserError for its settings."""
    backend: Backend = registry.load(KNOWN, config.backend.name).build(config.backend, config)
    return backend
