"""What is said of a key, a group or an option of Hydra's own that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError, nearest

_HYDRA = "hydra"
_MISSING = re.compile(r"In '([^']+)': Could not find '(.+)/([^/']+)'")
# Files in which Hydra looks for the options of a command.
_OF_A_COMMAND = ("config", "hydra/config")
# Groups whose options come from plug-ins, not from files.
_OF_PLUGINS = ("launcher", "sweeper")


def no_key(key: str) -> UserError | None:
    """Return what is said of a key or a group that Hydra does not have; None for another's."""
    if not re.match(rf"{_HYDRA}\b", key):
        return None
    if "/" in key:
        groups = _groups()
        listed = f"There is: {', '.join(groups)}."
        return UserError(f"There is no group '{key}'.{nearest(key, groups)} {listed}")
    known = [each for each in _keys() if not key.startswith(f"{each}.")]
    return UserError(f"There is no key '{key}'.{nearest(key, known)} --cfg hydra lists Hydra's.")


def no_option(error: Exception) -> UserError | None:
    """Return what is said of an option that a group does not have; None for another error."""
    options = getattr(error, "options", None)
    match = _MISSING.match(str(error))
    if match is None or not options:
        return None
    file, group, name = match.groups()
    where = "" if file in _OF_A_COMMAND else f"{file}: "
    listed = f"There is: {', '.join(options)}."
    return UserError(f"{where}There is no {group} '{name}'.{nearest(name, options)} {listed}")


def _groups() -> list[str]:
    from hydra import conf

    inside = Path(conf.__path__[0]) / _HYDRA
    names = [each.name for each in inside.iterdir() if each.is_dir()]
    return sorted(f"{_HYDRA}/{name}" for name in [*names, *_OF_PLUGINS])


def _keys() -> list[str]:
    from hydra.conf import HydraConf
    from omegaconf import OmegaConf

    return list(_within(_HYDRA, OmegaConf.to_container(OmegaConf.structured(HydraConf))))


def _within(name: str, value: Any) -> Iterator[str]:
    """Yield a key and those below it."""
    yield name
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _within(f"{name}.{key}", inner)
