"""Whether the launcher that a command asks for can work here, before anything is begun."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import UserError

GROUP = "hydra/launcher"
# The launchers that we install: the package of each, and our extra that brings it.
_INSTALLED_BY = {
    "joblib": ("hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "submitit_slurm": ("hydra_submitit_launcher", "slurm"),
}
# Our preset, and the launcher that it is of.
PRESETS = {"slurm": "submitit_slurm"}
_OF_SLURM = ("sbatch", "srun")


def check(name: str) -> None:
    """Raise UserError where a launcher's package or Slurm's commands are missing."""
    launcher = PRESETS.get(name, name)
    package, extra = _INSTALLED_BY.get(launcher, ("", ""))
    plugins = package and find_spec("hydra_plugins")
    if package and not (plugins and find_spec(f"hydra_plugins.{package}")):
        raise UserError(
            f"{GROUP}={name} needs the package {package.replace('_', '-')}, which is not installed",
            f"pip install 'layerparity[{extra}]'.",
        )
    missing = [each for each in _OF_SLURM if shutil.which(each) is None]
    if launcher == "submitit_slurm" and missing:
        raise UserError(
            f"{GROUP}={name} needs Slurm's {' and '.join(missing)}, not found on PATH",
            "run it on a node that submits to Slurm, or take hydra/launcher=submitit_local.",
        )
    if launcher == "submitit_slurm" and not _accounts():
        console.note(
            "sacct does not answer here: a part whose job Slurm ends is waited for until Ctrl-C"
        )


def left_running(sweep: Path) -> str:
    """Return the command that ends the jobs which Slurm has of a sweep's folder; empty for none."""
    scripts = (sweep / ".submitit").glob("*/*_submission.sh")
    jobs = sorted(script.parent.name for script in scripts if "#SBATCH" in script.read_text())
    return " ".join(["scancel", *jobs]) if jobs else ""


def _accounts() -> bool:
    """Say whether Slurm's accounting answers, by which submitit learns that a job has ended."""
    if shutil.which("sacct") is None:
        return False
    asked = ["sacct", "--noheader", "--jobs=1"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0
