"""The keys of a command line that make a stored configuration again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from layerparity.ground import registry
from layerparity.ground.quoting import numbers_as_text
from layerparity.ground.resources import shipped
from layerparity.settings.config import NAMED_BY, PLUGIN_GROUPS, Config
from layerparity.settings.model import CHECKPOINT

_BY_TARGET = "port"
_ALWAYS = ("backend",)
_NEVER = ("job", "experiment")
# What takes keys of any name: a port of one's own, and an architecture.
_GPU = re.compile(r"cuda:\d+")
_FOLDER = re.compile(r"model=(.+)")
_OPEN = re.compile(r"(port|model\.architecture)(\.\w+)+")
# Where our ports have been: stored configurations name them.
_FORMER_PORT = re.compile(r"layerparity\.(?:run\.)?ports\.(\w+\.\w+)")


def path_today(target: str) -> str:
    """Return the dotted path of the port that ``target`` named when it was stored."""
    former = _FORMER_PORT.fullmatch(target)
    return f"layerparity.ports.known.{former[1]}" if former else target


def as_meant(arguments: Sequence[str], given: Sequence[Path] = ()) -> list[str]:
    """Return the words of a command as Hydra has to be told what they mean.

    What looks like a number is text where its key takes a text, as runs' ids: an id that a table
    shows has no quotes. ``model=FOLDER`` and ``model=ORGANISATION/NAME`` are ``model.path=``;
    ``given`` are folders of groups beside our own, whose options are none of these.
    """
    texts = {key.name for key in dataclasses.fields(Config) if key.type == "str | None"}
    return [
        numbers_as_text(word)
        if word.partition("=")[0].lstrip("+") in texts
        else _FOLDER.sub(r"model.path=\1", word)
        if _names_folders(word, given)
        else word
        for word in arguments
    ]


def _names_folders(word: str, given: Sequence[Path]) -> bool:
    """Say whether a word is ``model=`` with a folder, or a list of them, and with no option."""
    match = _FOLDER.fullmatch(word)
    if match is None:
        return False
    values = [each.strip(" '\"") for each in match[1].split(",")]
    options = [
        (folder / "model" / each).with_suffix(".yaml") for folder in given for each in values
    ]
    return not any(option.is_file() for option in options) and all(
        "/" in each or (each not in _models() and Path(each).is_dir()) for each in values
    )


@cache
def _models() -> set[str]:
    return {path.stem for path in (shipped("conf") / "model").glob("*.yaml")}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a stored configuration sets, by key: options of groups, and ``group.key``.

    ``config`` is the whole of it as plain values. What a bare command would set as well is left
    out, but for the backend; so is the job. So is what no command of ours has: a folder from
    elsewhere may hold keys of Hydra's own, which name code.
    """
    port = config.get(_BY_TARGET)
    if isinstance(port, Mapping) and "_target_" in port:
        config = {**config, _BY_TARGET: {**port, "_target_": path_today(str(port["_target_"]))}}
    settings: dict[str, Any] = {}
    usual = _usual_options()
    for key, value in config.items():
        if key in _NEVER or key not in _root():
            continue
        if key in usual and not isinstance(value, Mapping):
            # A group is stored as its values; as a text it would name a file.
            continue
        default = _root().get(key)
        if key in usual and isinstance(value, Mapping):
            option = _option_of(key, value) or usual[key]
            if option != usual[key] or key in _ALWAYS:
                settings[key] = option
            default = _option(key, option)
        defaults = dict(_flat(key, default))
        settings.update(
            {
                # A key that an own port takes, and no option of ours has, must be added to it.
                f"+{k}" if k not in defaults and key == _BY_TARGET else k: v
                for k, v in _flat(key, value)
                if (v != defaults[k] if k in defaults else _OPEN.fullmatch(k))
            }
        )
    if "model.path" in settings and settings.get("model") == CHECKPOINT:
        # A folder needs no option of the model's.
        del settings["model"]
    return settings


def _option_of(group: str, value: Mapping[str, Any]) -> str | None:
    """Return which option of a group a stored value is, or None for one of the user's own."""
    # By their names: a stored text such as ../../elsewhere would be taken for a path.
    options = sorted(path.stem for path in (shipped("conf") / group).glob("*.yaml"))
    if group == _BY_TARGET and "_target_" in value:
        targets = {_option(group, option).get("_target_"): option for option in options}
        return targets.get(value["_target_"])
    option = str(value.get(NAMED_BY.get(group, "name")))
    # Every GPU has an option of its own: device_map=cuda:3.
    own_gpu = group == "device_map" and _GPU.fullmatch(option)
    return option if own_gpu or option in options else None


@cache
def _option(group: str, option: str) -> dict[str, Any]:
    """Return the values of an option as it stands: the schema's, and the YAML's over them."""
    import yaml

    values = dict(_root()[group] or {}) if isinstance(_root()[group], Mapping) else {}
    if group in PLUGIN_GROUPS:
        schema = getattr(registry.load(PLUGIN_GROUPS[group], option), "Settings", None)
        values = _plain(schema()) if schema else {}
    path = shipped("conf") / group / f"{option}.yaml"
    if not path.is_file():
        return {**values, NAMED_BY[group]: option}
    own = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return {**values, **{key: value for key, value in own.items() if key != "defaults"}}


@cache
def _usual_options() -> dict[str, str]:
    """Return the option that each group has in a bare command."""
    pairs = [each for each in _bare()["defaults"] if isinstance(each, dict)]
    return {k: v for each in pairs for k, v in each.items() if v and " " not in k}


@cache
def _bare() -> dict[str, Any]:
    """Return conf/config.yaml, of which a bare command is composed."""
    import yaml

    text = (shipped("conf") / "config.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _root() -> dict[str, Any]:
    own = {key: value for key, value in _bare().items() if key not in ("defaults", "hydra")}
    return {**_plain(Config()), **own}


def _plain(schema: Any) -> dict[str, Any]:
    raw = dataclasses.asdict(schema)
    return {key: value.name if isinstance(value, Enum) else value for key, value in raw.items()}


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value
