"""The key ``port.replay``: what a port repeats of a golden's routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerparity.anatomy.family import WEIGHED, family_of
from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# What port.replay is beside true: the weights of the chosen experts are the golden's as well.
ALL = "all"


def replays(config: Config) -> bool | str:
    """Return what the port repeats of the golden's routing: nothing, its choices, or `ALL`."""
    port = config.port
    asked = port.get("replay") if isinstance(port, Mapping) else getattr(port, "replay", False)
    return ALL if asked == ALL else bool(asked)


def check_replay(asked: bool | str, shown: Mapping[str, Sequence[str]]) -> list[str]:
    """Refuse a run that repeats a router's weights and does not look at them; return warnings.

    ``shown`` are the sites that it looks at of each stage with a router, by their address there.
    Raises UserError.
    """
    if asked and not shown:
        return [f"port.replay={str(asked).lower()}: no block of the scope has a router."]
    unseen = [stage for stage, sites in shown.items() if WEIGHED not in sites]
    if asked == ALL and unseen:
        raise UserError(
            f"port.replay={ALL} repeats the weights of each router's choices, and this run does "
            f"not look at {unseen[0]}.{WEIGHED}",
            "use a capture that has it, as capture=default, or port.replay=true.",
        )
    return []


def shows_weights(model_type: str) -> bool:
    """Return whether the routers of an architecture show what they weigh their experts by."""
    return any(tap.local == WEIGHED for tap in family_of(model_type).taps)
