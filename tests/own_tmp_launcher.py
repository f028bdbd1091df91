"""A launcher of Hydra's whose parts each have a /tmp of their own, as on nodes of a cluster.

A test copies it to ``hydra_plugins/own_tmp/launcher.py``. Each part is a process in a mount
namespace with an empty file system over the temporary folder; part ``DIES`` ends before its job.
With ``RAISES`` the launcher itself then raises, as submitit's does of a job that was lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

NAMESPACE = ["unshare", "--map-root-user", "--mount"]


class OwnTmpLauncher(Launcher):
    """Run each part in a mount namespace of its own, all of them at once."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        folder = Path(self.config.hydra.sweep.dir)
        parts = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            state = Singleton.get_state()
            job = (number, list(overrides), self.context, self.config, self.task, state)
            file = folder / f"{number}.pickle"
            file.write_bytes(cloudpickle.dumps(job))
            words = [sys.executable, "-m", __name__, str(file), tempfile.gettempdir()]
            parts.append(subprocess.Popen([*NAMESPACE, *words]))
        for part in parts:
            part.wait()
        if "RAISES" in os.environ:
            raise RuntimeError(os.environ["RAISES"])
        # As a launcher that does not look at how its jobs ended.
        return [JobReturn(status=JobStatus.COMPLETED) for _ in parts]


def work(file: str, tmp: str) -> None:
    """Run the part that a file holds, with an empty file system over ``tmp``."""
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp], check=True)
    number, overrides, context, config, task, state = cloudpickle.loads(Path(file).read_bytes())
    if os.environ.get("DIES") == str(number):
        os._exit(9)
    Singleton.set_state(state)
    setup_globals()
    part = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(part):
        part.hydra.job.id, part.hydra.job.num = f"job_{number}", number
    run_job(
        hydra_context=context,
        task_function=task,
        config=part,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


ConfigStore.instance().store(
    group="hydra/launcher", name="own_tmp", node={"_target_": f"{__name__}.OwnTmpLauncher"}
)
if __name__ == "__main__":
    work(*sys.argv[1:])
