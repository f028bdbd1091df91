"""Complete a key that has few values: Hydra itself offers the one that it has."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hydra.plugins.completion_plugin import CompletionPlugin

from layerparity.settings import config
from layerparity.settings.key import keys_of


def register() -> None:
    """Let Hydra's completion offer every value of a key, once in a process."""
    by_hydra = CompletionPlugin._query
    if getattr(by_hydra, "offers_values", False):
        return

    def query(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
        key, assigned, _ = line.rpartition(" ")[2].partition("=")
        values = _values(key) if assigned else []
        if not values:
            return by_hydra(self, config_name, line)
        typed = line.rpartition(" ")[2]
        return [word for word in (f"{key}={value}" for value in values) if word.startswith(typed)]

    # Hydra has no hook for it, and one class above those of all shells.
    query.offers_values = True  # type: ignore[attr-defined]
    CompletionPlugin._query = query  # type: ignore[method-assign]


def _values(path: str) -> list[str]:
    """Return the values of a key that has few of them: a choice, or yes and no."""
    keys = [*keys_of(config.Config)]
    for group, _, settings in config.plugin_schemas():
        keys += keys_of(settings, f"{group}.")
    found: dict[str, Any] = {each.path: each.default for each in keys}
    default = found.get(path)
    if isinstance(default, Enum):
        return [each.name for each in type(default)]
    return ["true", "false"] if isinstance(default, bool) else []
