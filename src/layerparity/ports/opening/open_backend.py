"""The backend that a configuration names: what it says of itself, and opened for one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from layerparity.backends import chosen
from layerparity.ports.opening import open_port
from layerparity.settings.config import RunKind

if TYPE_CHECKING:
    from layerparity.backends.base import Abilities, Backend
    from layerparity.machine.device import Affinity
    from layerparity.settings.config import Config


def affinity(name: str) -> Affinity:
    """Return how well a backend fits this machine; nothing heavy is imported."""
    return chosen.affinity_of(name)


def abilities(config: Config) -> Abilities:
    """Return what the backend can do with the port that runs on it; nothing heavy is imported."""
    abilities = chosen.abilities_of(config)
    if not open_port.is_transformers(config.port):
        # What somebody ported is judged, unless its author says that it is believed.
        abilities = replace(abilities, kind=RunKind.candidate)
    if open_port.ranks_device(config):
        # Its processes are its own, and what it makes is judged.
        return replace(
            abilities,
            kind=RunKind.candidate,
            eager=False,
            references=False,
            settings_once=False,
            libraries=(),
            gpu_compiler="",
        )
    return abilities


def build(config: Config) -> Backend:
    """Return the backend, not yet opened: it decides what may be imported from now on.

    Raises UserError for settings that it cannot take.
    """
    device = open_port.ranks_device(config)
    if not device:
        backend = chosen.build(config)
        # It has decided what may be imported: now a port of one's own may be looked at.
        device = open_port.ranks_device(config, importing=True)
        if not device:
            return backend
    from layerparity.backends.ranks import from_config

    return from_config(config, device, mapped=open_port.maps_devices(config))


@contextmanager
def opened(config: Config) -> Iterator[Backend]:
    """Open the backend for one run, and close it whatever happens."""
    backend = build(config)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()
