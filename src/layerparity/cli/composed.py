"""What the jobs of a sweep are composed to: ``-m ... --cfg job`` shows each as a YAML document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerparity.ground import quoting
from layerparity.ground.resources import shipped
from layerparity.settings.search_path import given_folders

_YES = ("true", "yes", "on", "1")


def show(parsed: Any, one: Callable[[list[str]], object]) -> None:
    """Have ``one`` print what each job of a sweep is composed to, after a line that names it.

    ``one`` gets the words of a command for one job.
    """
    jobs, options = _jobs(parsed), _options(parsed)
    options += [f"--package={parsed.package}"] if parsed.package else []
    options += ["--resolve"] if parsed.resolve else []
    for number, job in enumerate(jobs, start=1):
        print(f"---\n# job {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        one([*job, f"--cfg={parsed.cfg}", *options])


def is_dry(parsed: Any) -> bool:
    """Say whether a command asks for a dry run."""
    words = (word.lstrip("+").partition("=") for word in parsed.overrides)
    return any(key == "dry_run" and value.lower() in _YES for key, _, value in words)


def run_dry(parsed: Any, one: Callable[[list[str]], object]) -> None:
    """Have ``one`` run each job of a sweep as a command of its own, in this process.

    ``one`` gets the words of a command for one job. A launcher is not asked.
    """
    for job in _jobs(parsed):
        words = [word for word in job if not word.startswith("hydra/launcher=")]
        # An experiment that sweeps by itself would begin the sweep.
        one([*words, "hydra.mode=RUN", *_options(parsed)])


def _options(parsed: Any) -> list[str]:
    return [f"--config-dir={parsed.config_dir}"] if parsed.config_dir else []


def _jobs(parsed: Any) -> list[list[str]]:
    """Return the words of each job of a sweep, as Hydra's sweeper combines them."""
    from hydra import initialize_config_dir

    from layerparity.making import sweep

    with initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute())):
        parts = sweep.parts_of([*_swept_by_experiment(parsed), *parsed.overrides])
    sweep.refuse_none(parts)
    return parts


def _with_folder(words: list[str], folder: str) -> str:
    """Return the word by which Hydra also looks into a folder, beside those that ``words`` name."""
    named = [str(each) for each in given_folders(None, words)]
    return quoting.word("hydra.searchpath", [str(Path(folder).absolute()), *named])


def is_sweep(parsed: Any) -> bool:
    """Say whether a command is a sweep: by ``-m``, or by the experiment that it chooses."""
    from hydra import initialize_config_dir

    if parsed.multirun:
        return True
    with initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute())):
        return bool(_swept_by_experiment(parsed))


def _swept_by_experiment(parsed: Any) -> list[str]:
    """Return what the chosen experiment itself sweeps over, as words; wants Hydra initialised."""
    from hydra import compose
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    chosen = [
        word for word in parsed.overrides if not parser.parse_override(word).is_sweep_override()
    ]
    if parsed.config_dir:
        chosen.append(_with_folder(chosen, parsed.config_dir))
    whole = compose("config", overrides=chosen, return_hydra_config=True)
    params = whole.hydra.sweeper.get("params") or {}
    return [f"{key}={value}" for key, value in params.items()]
