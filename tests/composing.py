"""Hydra that composes what it has composed before from memory, in a process of tests.

A command's choice of groups and their files decide most of a composition, 0.13 s of each of
thousands of commands. `remember` keeps the list of defaults and what is composed from it by all
that they depend on: the words that choose, the places that are searched, the state of their files,
and the schemas; a file's content by its state, and a parsed word by its letters. Values, and all
that is checked after, are Hydra's own each time; so is everything in the processes that tests
start, and wherever a command names places of its own.
"""

from __future__ import annotations

import copy
import os
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, ListConfig, ValueNode
from omegaconf.base import ContainerMetadata, Metadata, Node

# Hydra makes the classes of its plugins anew when it looks for them.
Plugins.instance()
from hydra._internal.core_plugins.file_config_source import FileConfigSource  # noqa: E402

# Who adds the places that every command of ours searches.
PROVIDERS = {"hydra", "main", "layerparity", "schema"}
# Only with one of these words may a command's configuration set ``hydra.mode``.
MODES = ("hydra", "experiment=")
# Hydra's own, which compose, read and parse anew.
ORDINARY = (
    config_loader_impl.create_defaults_list,
    ConfigLoaderImpl._compose_config_from_defaults_list,
    FileConfigSource.load_config,
    OverridesParser.parse_rule,
)


_LISTED, _COMPOSED, _LOADED, _PARSED = ORDINARY
# Their values are of kinds that nobody can change, or that no copy of theirs copies.
_VALUES = ValueNode.__subclasses__()
_MODE, _CHOSEN = Hydra.get_mode, defaults_list._create_interpolation_map
# What a command without ``model=`` runs in most tests: six blocks, where the default has 62. None
# for what the file says, as in the processes that tests start and in what the pages type.
default_model: str | None = "tiny_minimax_m2"
# What was composed, read and parsed.
_kept: dict[Hashable, Any] = {}
# Objects whose identity is part of a key: another's must not be the same.
_held: dict[int, Any] = {}


def remember() -> None:
    """Have Hydra remember, in this process, what it composed, read and parsed."""
    # Hydra copies its sources for each command, and with them every schema that is stored.
    ConfigStore.__deepcopy__ = lambda store, memo: store
    # A command copies some thousand nodes, each of which says which of its parts can be changed.
    for each in (Metadata, ContainerMetadata):
        each.__deepcopy__ = _copied
    for each in (DictConfig, ListConfig, *_VALUES):
        each.__deepcopy__ = _copied_node
    _ask_for_no_virtual_nodes(Node)
    Hydra.get_mode = _get_mode
    defaults_list._create_interpolation_map = _chosen
    config_loader_impl.create_defaults_list = _create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _compose
    FileConfigSource.load_config = _load_config
    OverridesParser.parse_rule = _parse_rule


def with_default_model(options: dict[str, str]) -> dict[str, str]:
    """Return the usual options of the groups with the model that tests run by default."""
    return {**options, "model": default_model or options["model"]}


def _once(key: Hashable, make: Callable[[], Any]) -> Any:
    if key not in _kept:
        _kept[key] = copy.deepcopy(make())
    return copy.deepcopy(_kept[key])


def _create_defaults_list(repo: Any, config_name: Any, overrides_list: Any, **how: Any) -> Any:
    places = _places(repo)
    if places is None:
        return _LISTED(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
    # As `Overrides` of Hydra tells them apart.
    values = [
        word
        for word in overrides_list
        if not word.is_sweep_override()
        and (isinstance(word.value(), dict) or not repo.group_exists(word.key_or_group))
    ]
    chosen = [word for word in overrides_list if word not in values]
    how_ = (*sorted(how.items()), default_model)
    key = (config_name, *(word.input_line for word in chosen), *how_, places)
    made = _once(key, lambda: _LISTED(repo, config_name, chosen, **how))
    made.config_overrides = values
    return made


def _compose(loader: Any, defaults: list[ResultDefault], repo: Any) -> Any:
    places = _places(repo)
    if places is None:
        return _COMPOSED(loader, defaults, repo)
    key = (*(repr(each) for each in defaults), places)
    return _once(key, lambda: _COMPOSED(loader, defaults, repo))


def _load_config(source: Any, config_path: str) -> Any:
    file = Path(source.path, config_path).with_suffix(".yaml")
    if not file.is_file():
        return _LOADED(source, config_path)
    key = (source.provider, source.path, *_state_of(file))
    made = _once(key, lambda: _LOADED(source, config_path))
    if default_model and config_path == "config":
        for each in made.config.defaults:
            if "model" in each:
                each.model = default_model
    return made


def _parse_rule(parser: Any, s: str, rule_name: str) -> Any:
    return _once((s, rule_name), lambda: _PARSED(parser, s, rule_name))


def _get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return what only a command or an experiment that says so can set."""
    if any(word.lstrip("+").startswith(MODES) for word in overrides):
        return _MODE(hydra, config_name, overrides)
    return None


def _chosen(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Return what was chosen only where something is named by it, which is half of the work."""
    named = any(each.is_interpolation() for each in defaults)
    return _CHOSEN(overrides, defaults, self_added) if named else None


class _NodeMeta(ABCMeta):
    """Of OmegaConf's nodes, which nobody registers others as."""

    __instancecheck__ = type.__instancecheck__


def _ask_for_no_virtual_nodes(kind: type) -> None:
    """Have thirty thousand questions a command whether this is a node answered at once."""
    kind.__class__ = _NodeMeta
    for each in kind.__subclasses__():
        _ask_for_no_virtual_nodes(each)


def _places(repo: Any) -> Hashable:
    """Return the state of all places that are searched; None where it is not known."""
    sources = repo.get_sources()
    if not {source.provider for source in sources} <= PROVIDERS:
        return None
    return tuple((source.scheme(), source.path, tuple(_state(source))) for source in sources)


def _state(source: Any) -> Iterator[Hashable]:
    if source.scheme() in ("file", "experiments"):
        yield from sorted(_below(source.path))
    elif source.scheme() == "structured":
        yield from _nodes(ConfigStore.instance().repo)


def _below(folder: str) -> Iterator[tuple[Hashable, ...]]:
    """Yield the state of each YAML file below a folder."""
    with os.scandir(folder) as entries:
        for each in entries:
            if each.name.endswith(".yaml"):
                yield _state_of(each)
            elif each.is_dir():
                yield from _below(each.path)


def _state_of(file: Path | os.DirEntry[str]) -> tuple[Hashable, ...]:
    found = file.stat()
    return os.fspath(file), found.st_mtime_ns, found.st_size


def _copied(metadata: Any, memo: dict[int, Any]) -> Any:
    made = object.__new__(type(metadata))
    made.__dict__.update(metadata.__dict__)
    if metadata.flags:
        made.flags = dict(metadata.flags)
    if metadata.resolver_cache:
        made.resolver_cache = copy.deepcopy(metadata.resolver_cache)
    else:
        made.resolver_cache = defaultdict(dict)
    return made


def _copied_node(node: Any, memo: dict[int, Any]) -> Any:
    """Return a node of the same value, parent and type, as the nodes' own copies are."""
    made = object.__new__(type(node))
    own = made.__dict__
    own.update(node.__dict__, _flags_cache=None, _metadata=_copied(node._metadata, memo))
    content = own.get("_content")
    if isinstance(content, dict):
        own["_content"] = {name: _child(each, made, memo) for name, each in content.items()}
    elif isinstance(content, list):
        own["_content"] = [_child(each, made, memo) for each in content]
    return made


def _child(node: Any, parent: Any, memo: dict[int, Any]) -> Any:
    copied = type(node).__deepcopy__(node, memo)
    copied.__dict__["_parent"] = parent
    return copied


def _nodes(tree: dict[str, Any]) -> Iterator[Hashable]:
    for name, each in tree.items():
        if isinstance(each, dict):
            yield name
            yield from _nodes(each)
        else:
            _held[id(each)] = each
            yield name, id(each)
