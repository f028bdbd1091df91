"""The keys of a port that computes as several ranks do: what they may be, and how they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerparity.backends.chosen import abilities_of
from layerparity.ground.errors import UserError
from layerparity.settings.config import Config, RunKind
from layerparity.settings.key import key

TP, EP = "emulate_tp", "emulate_ep"
_LEAVE = "leave it out"


@dataclass
class Settings:
    """What conf/port/hf.yaml has; it is no schema of it, since a user's port has other keys."""

    emulate_tp: int | None = key(None, "compute as so many tensor-parallel ranks, in one process")
    emulate_ep: int | None = key(None, "of them, groups that share the experts by number")


def check(config: Config, keys: Mapping[str, Any]) -> None:
    """Refuse ranks that no model could be computed as; torch is not imported. Raises UserError."""
    for name in (TP, EP):
        asked = keys.get(name)
        number = isinstance(asked, int) and not isinstance(asked, bool)
        if asked is not None and (not number or asked < 1):
            raise UserError(
                f"port.{name}={asked} is no number of ranks: use 2 or more, or {_LEAVE}."
            )
    count, groups = keys.get(TP), keys.get(EP)
    if groups is not None and (count is None or count % groups):
        of = "leaves out how many" if count is None else f"does not divide port.{TP}={count}"
        raise UserError(
            f"port.{EP}={groups} shares experts among ranks, and {of}: give port.{TP}, a multiple "
            f"of it, or {_LEAVE}."
        )
    if count is None:
        return
    if config.kind is RunKind.golden:
        raise UserError(
            f"port.{TP}={count} is there to be judged, not believed: add kind=candidate."
        )
    if config.tp_degree > 1:
        raise UserError(
            f"port.{TP}={count} emulates ranks in one process, and tp_degree={config.tp_degree} "
            "starts some: use tp_degree=1."
        )
    if not abilities_of(config).eager:
        raise UserError(f"port.{TP}={count} computes eagerly: use backend=gpu device_map=cpu.")


def numerics(config: Config) -> dict[str, str]:
    """Return how many ranks a run emulates, and how many groups share its experts."""
    port = config.port
    keys = port if isinstance(port, Mapping) else vars(port)
    return {name: str(keys[name]) for name in (TP, EP) if keys.get(name) is not None}
