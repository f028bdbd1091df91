"""What the jobs of a sweep are composed to: ``-m ... --cfg job`` shows each as a YAML document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerparity.ground.resources import shipped


def show(parsed: Any, one: Callable[[list[str]], object]) -> None:
    """Have ``one`` print what each job of a sweep is composed to, after a line that names it.

    ``one`` gets the words of a command for one job.
    """
    from hydra import initialize_config_dir

    from layerparity.run import sweep

    with initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute())):
        jobs = sweep.parts_of([*_swept_by_experiment(parsed), *parsed.overrides])
    for number, job in enumerate(jobs, start=1):
        print(f"---\n# job {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        options = [f"--config-dir={parsed.config_dir}"] if parsed.config_dir else []
        options += [f"--package={parsed.package}"] if parsed.package else []
        options += ["--resolve"] if parsed.resolve else []
        one([*job, f"--cfg={parsed.cfg}", *options])


def _swept_by_experiment(parsed: Any) -> list[str]:
    """Return what the chosen experiment itself sweeps over, as words; wants Hydra initialised."""
    from hydra import compose
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    chosen = [
        word for word in parsed.overrides if not parser.parse_override(word).is_sweep_override()
    ]
    if parsed.config_dir:
        chosen.append(f"hydra.searchpath=[{parsed.config_dir}]")
    whole = compose("config", overrides=chosen, return_hydra_config=True)
    params = whole.hydra.sweeper.get("params") or {}
    return [f"{key}={value}" for key, value in params.items()]
