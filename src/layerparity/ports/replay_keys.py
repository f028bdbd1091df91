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


def refuse_unweighed(stage: str, shown: Sequence[str]) -> None:
    """Raise UserError where a run repeats a router's weights and does not look at them.

    ``shown`` are the sites of a stage that it looks at, by their address there.
    """
    if WEIGHED not in shown:
        raise UserError(
            f"port.replay={ALL} repeats the weights of each router's choices, and this run does "
            f"not look at {stage}.{WEIGHED}",
            "use a capture that has it, as capture=default, or port.replay=true.",
        )


def shows_weights(model_type: str) -> bool:
    """Return whether the routers of an architecture show what they weigh their experts by."""
    return any(tap.local == WEIGHED for tap in family_of(model_type).taps)
