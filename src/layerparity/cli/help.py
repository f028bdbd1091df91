"""The help text: what is there, and of each job and group its own options and keys.

A job's heading and each option's line come from its YAML's first comments, a key's from its schema.
"""

from __future__ import annotations

import dataclasses
import textwrap
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

# Each group with what it chooses.
GROUPS = {
    "backend": "what runs the model",
    "scope": "how much of it",
    "device_map": "where its weights are",
    "model": "which model; a folder and ORGANISATION/NAME as well",
    "inputs": "what it is fed",
    "port": "whose code computes",
    "capture": "what is stored",
    "tolerance": "what a comparison lets pass",
    "tracking": "where runs are kept",
}
# Jobs stand under the one that their YAML names; one that names none is not for typing.
_HEADINGS = ("make", "judge", "look closer", "store", "prepare")
_HEADING = "# heading: "
_COLUMNS = 120
# A key and its default stand in a column of this width, where they are no wider.
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
python run.py job=NAME --help shows that job's keys; GROUP= --help, as backend= --help, a group's.
--cfg job shows the composed configuration; eval "$(python run.py -sc install=bash)" installs
completion (bash, zsh, fish); --hydra-help is Hydra's own help.
"""
_ELSEWHERE = """\
python run.py --help lists all jobs and groups.
"""


def text() -> str:
    """Return the whole help text."""
    parts = [_USAGE]
    jobs = options("job")
    for heading, names in headings().items():
        rows = {name: jobs[name] for name in names}
        parts.append(_section(f"{heading.capitalize()} (job=)", rows, max(map(len, jobs))))
    parts.append(_section("Experiments (experiment=)", options("experiment")))
    lines = {name: f"{does}: {', '.join(options(name))}" for name, does in GROUPS.items()}
    parts.append(_section("Groups (GROUP=OPTION)", lines))
    machine = {}
    for name in registry.names(KNOWN):
        fit = affinity_of(name)
        how = ("cannot run", "stands in", "fits")[fit.score]
        machine[name] = f"{how:<11}{fit.device}: {fit.reason}"
    parts.append(_section("On this machine", machine))
    return _as_called("\n".join([*parts, _keys(), _ENDING]))


def headings() -> dict[str, list[str]]:
    """Return the names of the jobs under each heading, in the order of a user's day."""
    under: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for file in sorted((shipped("conf") / "job").glob("*.yaml")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(_HEADING):
                under[line.removeprefix(_HEADING)].append(file.stem)
    return under


def typed_jobs() -> list[str]:
    """Return the names of the jobs that a person types, sorted: those under a heading."""
    return sorted(name for names in headings().values() for name in names)


def answer(arguments: Sequence[str]) -> str:
    """Return the help of the one job, group or family of keys that a command names, or the whole.

    A job and a group may stand by themselves, as ``compare`` and ``backend``.
    """
    jobs = options("job")
    chosen = [word.removeprefix("job=") for word in arguments if word.startswith("job=")]
    chosen = chosen or [word for word in arguments if word in {*jobs} - {*GROUPS}]
    if len(chosen) == 1 and chosen[0] in jobs:
        (job,) = chosen
        name = "" if job == _USUAL else f"job={job} "
        lines = [f"job={job}: {jobs[job]}", ""]
        lines += [f"  python run.py {name}[group=option ...] [key=value ...]", ""]
        return _told(lines, keys_of_job(job))
    named = [word.partition("=")[0] for word in arguments]
    groups = [word for word in named if word in GROUPS or keys_of_group(word)]
    if len(groups) != 1 or chosen:
        return text()
    (group,) = groups
    lines = [_section(f"{group}=: {GROUPS[group]}", options(group))] if group in GROUPS else []
    return _told(lines, keys_of_group(group))


def _told(lines: Sequence[str], keys: Mapping[str, str]) -> str:
    """Return lines, then keys with what they do, and where the rest is."""
    rows = ["Its keys and their defaults", *_rows(keys), ""] if keys else []
    return _as_called("\n".join([*lines, *rows, _ELSEWHERE]))


def keys_of_job(job: str) -> dict[str, str]:
    """Return what each key that a job reads does, by ``key=default``: its own, and a run's."""
    reads = getattr(registry.load("jobs", job), "READS", None)
    keys = [key for key in keys_of(Config) if _reads(job, reads, key)]
    for group, option, settings in plugin_schemas():
        keys += keys_of(settings, "job.") if (group, option) == ("job", job) else []
    # A key without words names an option; where runs are kept is said in its group's help.
    told = [key for key in keys if key.help and not key.path.startswith("tracking.")]
    # Its own first, those of every run next, those of what a run is asked last.
    told.sort(key=lambda key: (not key.path.startswith("job."), "." in key.path))
    return {f"{key.path}={_plain(key.default)}": key.help for key in told}


def keys_of_group(group: str) -> dict[str, str]:
    """Return what each key of a group does, by ``key=default``, in alphabetical order."""
    return {words: does for words, does in dotted_keys().items() if words.startswith(f"{group}.")}


def _reads(job: str, reads: Sequence[str] | None, key: Key) -> bool:
    """Say whether a job reads a key: one of the groups that its module lists, where it does so."""
    if reads is not None:
        return key.path.partition(".")[0] in reads
    return job in ((_USUAL,) if key.jobs is None else key.jobs)


def _as_called(words: str) -> str:
    """Return a text with its commands as this one was called."""
    return words.replace("python run.py", program())


def _rows(rows: Mapping[str, str], least: int = 0) -> list[str]:
    """Return a line or more for each name, with what it does in a column of its own."""
    width = min(max((least, *map(len, rows))), _WIDEST)
    lines = []
    for name, does in rows.items():
        wide = max(width, len(name))
        behind = " " * (width + 4)
        lines += textwrap.wrap(
            f"  {name:<{wide}}  {does}",
            _COLUMNS,
            subsequent_indent=behind,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


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


def _section(title: str, rows: Mapping[str, str], least: int = 0) -> str:
    return "\n".join([title, *_rows(rows, least)]) + "\n"


def _keys() -> str:
    """List the typed keys outside the groups, with their defaults."""
    shown = []
    for item in dataclasses.fields(Config):
        if item.default is dataclasses.MISSING or item.name in (*GROUPS, "job"):
            continue
        default = getattr(item.default, "value", item.default)
        shown.append(f"{item.name}={'null' if default is None else str(default).lower()}")
    title = "Keys and their defaults (job=run --help says what each does)"
    return "\n".join([title, *_filled(shown)]) + "\n"


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
    """Return words in lines that are indented, and no wider than the rest."""
    indent = "  "
    return textwrap.wrap(
        " ".join(words),
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
