"""Help: groups, jobs and experiments with one line each, read from the YAML files' first lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from layerparity.cli.search_path import experiment_folders
from layerparity.ground import registry
from layerparity.ground.resources import shipped
from layerparity.settings.config import Config
from layerparity.settings.glosses import dotted_keys

GROUPS = (
    "backend",
    "scope",
    "device_map",
    "model",
    "inputs",
    "port",
    "capture",
    "tolerance",
    "tracking",
)
_WIDEST = 34
_USAGE = """\
layerparity: layer-by-layer numerical parity between two machines running one language model.

  python run.py [job=NAME] [experiment=NAME] [group=option ...] [key=value ...]
  python run.py -m ... 'layer=range(0,6)'    sweep: one parent run, one child for each value

  python run.py backend=gpu device_map=cpu                     a golden run
  python run.py backend=neuron scope=range start=0 end=3       a candidate run, layers 0 to 3
  python run.py job=compare                                    the newest pair, with a verdict
  python run.py job=ui                                         browse it all in MLflow
"""
_ENDING = """\
Exit status: 0 parity or success, 1 the comparison failed, 2 a mistake in the command or a missing
device, 3 an internal error, 4 inconclusive.
--cfg job shows the composed configuration; eval "$(python run.py -sc install=bash)" installs
completion (bash, zsh, fish); --hydra-help is Hydra's own help.
"""


def text() -> str:
    """Return the whole help text."""
    parts = [_USAGE, _section("Jobs (job=)", shipped("conf") / "job")]
    for folder in experiment_folders():
        parts.append(_section("Experiments (experiment=)", folder))
    parts += [_section(f"{group}=", shipped("conf") / group) for group in GROUPS]
    parts += [_machine(), _keys(), _ENDING]
    return "\n".join(parts)


def _machine() -> str:
    """Say how well each backend fits the machine this runs on, and why."""
    lines = ["On this machine"]
    for name in registry.names("run.backends"):
        fit = registry.load("run.backends", name).affinity()
        how = ("cannot run", "stands in", "fits")[fit.score]
        lines.append(f"  {name:<8}{how:<11}{fit.device}: {fit.reason}")
    return "\n".join(lines) + "\n"


def options(group: str) -> dict[str, str]:
    """Return a group's options with what each one is, by name."""
    folders = experiment_folders() if group == "experiment" else [shipped("conf") / group]
    return {
        file.stem: describe(file)
        for folder in reversed(folders)
        for file in sorted(folder.glob("*.yaml"))
    }


def describe(file: Path) -> str:
    """Return the first comment line of a YAML file that is not a directive."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @"):
            continue
        return line.removeprefix("#").strip() if line.startswith("#") else ""
    return ""


def _section(title: str, folder: Path) -> str:
    files = sorted(folder.glob("*.yaml"))
    width = max((len(file.stem) for file in files), default=0)
    lines = [f"  {file.stem:<{width}}  {describe(file)}" for file in files]
    return "\n".join([title, *lines]) + "\n"


def _keys() -> str:
    """List the typed keys outside the groups, with their defaults."""
    shown = []
    for item in dataclasses.fields(Config):
        if item.default is dataclasses.MISSING or item.name in (*GROUPS, "job"):
            continue
        default = getattr(item.default, "value", item.default)
        shown.append(f"{item.name}={'null' if default is None else str(default).lower()}")
    dotted = dotted_keys()
    told = {words: gloss for words, gloss in dotted.items() if _head(words) != "tolerance"}
    limits = [words for words in dotted if words not in told]
    width = min(max(map(len, told)), _WIDEST)
    lines = [f"  {words:<{width}}  {gloss}" for words, gloss in told.items()]
    parts = ["Keys and their defaults", *_filled(shown), *lines]
    return "\n".join([*parts, "  Limits of the tolerances:", *_filled(limits)]) + "\n"


def _head(key: str) -> str:
    return key.partition(".")[0]


def _filled(words: Sequence[str]) -> list[str]:
    """Return words in lines of at most 98 characters."""
    lines, line = [], " "
    for word in words:
        if len(line) + len(word) > 98:
            lines.append(line)
            line = " "
        line += f" {word}"
    return [*lines, line]
