"""Hydra that composes what it has composed before from memory, in a process of tests.

A command's choice of groups and their files decide most of a composition, 0.13 s of each of
thousands of commands. `remember` keeps the list of defaults and what is composed from it by all
that they depend on: the words that choose, the places that are searched, the state of their files,
and the schemas. Values, and all that is checked after, are Hydra's own each time; so is everything
in the processes that tests start, and wherever a command names places of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault

# Who adds the places that every command of ours searches.
PROVIDERS = {"hydra", "main", "layerparity", "schema"}
# Only with one of these words may a command's configuration set ``hydra.mode``.
MODES = ("hydra", "experiment=")
# Hydra's own, which compose anew.
ORDINARY = (
    config_loader_impl.create_defaults_list,
    ConfigLoaderImpl._compose_config_from_defaults_list,
)


def remember() -> None:
    """Have Hydra remember, in this process, what it composed."""
    kept: dict[Hashable, Any] = {}
    # Objects whose identity is part of a key: another's must not be the same.
    held: dict[int, Any] = {}

    def once(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in kept:
            kept[key] = copy.deepcopy(make())
        return copy.deepcopy(kept[key])

    listed, composed = ORDINARY

    def create_defaults_list(repo: Any, config_name: Any, overrides_list: Any, **how: Any) -> Any:
        places = _places(repo, held)
        if places is None:
            return listed(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        # As `Overrides` of Hydra tells them apart.
        values = [
            word
            for word in overrides_list
            if not word.is_sweep_override()
            and (isinstance(word.value(), dict) or not repo.group_exists(word.key_or_group))
        ]
        chosen = [word for word in overrides_list if word not in values]
        key = (config_name, *(word.input_line for word in chosen), *sorted(how.items()), places)
        made = once(key, lambda: listed(repo, config_name, chosen, **how))
        made.config_overrides = values
        return made

    def compose(loader: Any, defaults: list[ResultDefault], repo: Any) -> Any:
        places = _places(repo, held)
        if places is None:
            return composed(loader, defaults, repo)
        key = (*(repr(each) for each in defaults), places)
        return once(key, lambda: composed(loader, defaults, repo))

    looked_up = Hydra.get_mode

    def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        """Return what only a command or an experiment that says so can set."""
        if any(word.lstrip("+").startswith(MODES) for word in overrides):
            return looked_up(hydra, config_name, overrides)
        return None

    Hydra.get_mode = get_mode
    # Hydra copies its sources for each command, and with them every schema that is stored.
    ConfigStore.__deepcopy__ = lambda store, memo: store
    config_loader_impl.create_defaults_list = create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = compose


def _places(repo: Any, held: dict[int, Any]) -> Hashable:
    """Return the state of all places that are searched; None where it is not known."""
    sources = repo.get_sources()
    if not {source.provider for source in sources} <= PROVIDERS:
        return None
    return tuple((source.scheme(), source.path, tuple(_state(source, held))) for source in sources)


def _state(source: Any, held: dict[int, Any]) -> Iterator[Hashable]:
    if source.scheme() in ("file", "experiments"):
        for path in sorted(Path(source.path).rglob("*.yaml")):
            found = path.stat()
            yield str(path), found.st_mtime_ns, found.st_size
    elif source.scheme() == "structured":
        yield from _nodes(ConfigStore.instance().repo, held)


def _nodes(tree: dict[str, Any], held: dict[int, Any]) -> Iterator[Hashable]:
    for name, each in tree.items():
        if isinstance(each, dict):
            yield name
            yield from _nodes(each, held)
        else:
            held[id(each)] = each
            yield name, id(each)
