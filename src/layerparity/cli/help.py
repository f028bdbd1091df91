"""The help text: a line for each option, from its YAML's first line, and each key's own help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from layerparity.backends.chosen import KNOWN, affinity_of
from layerparity.ground import registry
from layerparity.ground.program import program
from layerparity.ground.resources import shipped
from layerparity.settings.config import NAMED_BY, Config, plugin_schemas
from layerparity.settings.key import Key, keys_of
from layerparity.settings.search_path import experiment_folders

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
# The job of a command that names none.
_USUAL = "run"
# Keys that say what an option is called: it is chosen by its group instead.
_CHOSEN_BY_GROUP = (".name", "port._target_", *(f"{g}.{key}" for g, key in NAMED_BY.items()))
_OWN_PORT = ("port._target_=...", "a port of your own: their.module.Port")
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
device, 3 an internal error, 4 inconclusive, 5 job=doctor or job=plan: this machine lacks something.
--quiet prints errors alone; --json prints a comparison's verdict alone, or the list of job=runs.
python run.py job=NAME --help shows that job's keys, and what each does.
--cfg job shows the composed configuration; eval "$(python run.py -sc install=bash)" installs
completion (bash, zsh, fish); --hydra-help is Hydra's own help.
"""
_ELSEWHERE = """\
python run.py --help lists all groups, jobs and keys.
"""


def text() -> str:
    """Return the whole help text."""
    parts = [_USAGE, _section("Jobs (job=)", shipped("conf") / "job")]
    for folder in experiment_folders():
        parts.append(_section("Experiments (experiment=)", folder))
    parts += [_section(f"{group}=", shipped("conf") / group) for group in GROUPS]
    machine = ["On this machine"]
    for name in registry.names(KNOWN):
        fit = affinity_of(name)
        how = ("cannot run", "stands in", "fits")[fit.score]
        machine.append(f"  {name:<8}{how:<11}{fit.device}: {fit.reason}")
    return _as_called("\n".join([*parts, *machine, "", _keys(), _ENDING]))


def answer(arguments: Sequence[str]) -> str:
    """Return the help of the job that a command names, the whole text where it names none."""
    jobs = options("job")
    chosen = [word.removeprefix("job=") for word in arguments if word.startswith("job=")]
    if len(chosen) != 1 or chosen[0] not in jobs:
        return text()
    (job,) = chosen
    name = "" if job == _USUAL else f"job={job} "
    lines = [f"job={job}: {jobs[job]}", ""]
    lines += [f"  python run.py {name}[group=option ...] [key=value ...]", ""]
    reads = getattr(registry.load("jobs", job), "READS", None)
    keys = [key for key in keys_of(Config) if _reads(job, reads, key)]
    for group, option, settings in plugin_schemas():
        keys += keys_of(settings, "job.") if (group, option) == ("job", job) else []
    # A key without words names an option; where runs are kept is said in the whole text.
    told = [key for key in keys if key.help and not key.path.startswith("tracking.")]
    rows = {f"{key.path}={_plain(key.default)}": key.help for key in told}
    lines += ["Its keys and their defaults", *_rows(rows), ""] if rows else []
    return _as_called("\n".join([*lines, _ELSEWHERE]))


def _reads(job: str, reads: Sequence[str] | None, key: Key) -> bool:
    """Say whether a job reads a key: one of the groups that its module lists, where it does so."""
    if reads is not None:
        return key.path.partition(".")[0] in reads
    return job in ((_USUAL,) if key.jobs is None else key.jobs)


def _as_called(words: str) -> str:
    """Return a text with its commands as this one was called."""
    return words.replace("python run.py", program())


def _rows(rows: Mapping[str, str]) -> list[str]:
    """Return a line for each ``key=default``, with what it does in a column of its own."""
    width = min(max(map(len, rows)), _WIDEST)
    return [f"  {words:<{width}}  {does}" for words, does in rows.items()]


def options(group: str, given: Sequence[Path] = ()) -> dict[str, str]:
    """Return a group's options with what each one is, by name; also of folders that were given."""
    folders = experiment_folders() if group == "experiment" else [shipped("conf") / group]
    folders += [folder / group for folder in given]
    return {
        file.relative_to(folder).with_suffix("").as_posix(): describe(file)
        for folder in reversed(folders)
        for file in sorted(folder.rglob("*.yaml"))
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
    limits = [words for words in dotted if words.startswith("tolerance.")]
    explained = {words: does for words, does in dotted.items() if words not in limits}
    parts = ["Keys and their defaults", *_filled(shown), *_rows(explained)]
    return "\n".join([*parts, "  Limits of the tolerances:", *_filled(limits)]) + "\n"


def dotted_keys() -> dict[str, str]:
    """Return what each key with a dot does, by ``key=default``, in alphabetical order."""
    # Each beside the option of its group that has it, empty where all do.
    pairs = [("", key) for key in keys_of(Config) if "." in key.path]
    for group, option, settings in plugin_schemas():
        pairs += [(option, key) for key in keys_of(settings, f"{group}.")]
    by_path: dict[str, dict[str, Key]] = {}
    for option, key in pairs:
        # A port's name is a choice of its own: which fault, which clean way.
        if key.path == "port.name" or not key.path.endswith(_CHOSEN_BY_GROUP):
            by_path.setdefault(key.path, {})[option] = key
    rows = [(path, *_described(path, keys)) for path, keys in by_path.items()]
    return {words: does for _, words, does in sorted([*rows, (_OWN_PORT[0], *_OWN_PORT)])}


def _described(path: str, keys: dict[str, Key]) -> tuple[str, str]:
    """Return ``key=default`` of a path, and what it does, from the key of each option."""
    defaults = dict.fromkeys(_plain(key.default) for key in keys.values())
    does = next(iter(keys.values())).help
    if len({key.help for key in keys.values()}) > 1:
        does = "; ".join(f"{option}: {key.help}" for option, key in keys.items())
    if "" not in keys:
        does = f"{path.partition('.')[0]}={','.join(keys)}: {does}"
    return f"{path}={'|'.join(defaults)}", does


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    if value is None or value == MISSING:
        return "null"
    value = getattr(value, "value", value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _filled(words: Sequence[str]) -> list[str]:
    """Return words in lines of at most 98 characters."""
    lines, line = [], " "
    for word in words:
        if len(line) + len(word) > 98:
            lines.append(line)
            line = " "
        line += f" {word}"
    return [*lines, line]
