"""Sweeps on Slurm itself: one node, whose daemons are this machine's own processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_here
from test_cluster import asked, awaited, seen, sweep

from layerparity.record.stored_run import StoredRun
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

pytestmark = pytest.mark.skipif(bool(slurm_here.missing()), reason=slurm_here.missing())
SMALL = ("hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")
TWO = ("layer=0", "dtype=float32,bfloat16")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_here.Slurm]:
    """A Slurm of one node."""
    pytest.importorskip("submitit", reason="the extra slurm is not installed: make test brings it")
    cluster = slurm_here.Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_the_parts_of_a_sweep_are_tasks_of_one_job_array(tmp_path, slurm):
    code, out, err = sweep(tmp_path, *TWO, *SMALL, **slurm.environment)
    assert code == 0, out + err
    assert "2 of 2 parts finished" in out
    assert "note: sacct does not answer here" in out
    # A part has said how it ended before its job has ended.
    awaited(lambda: not slurm.said("squeue", "--noheader"))
    jobs = slurm.said("scontrol", "show", "job", "--oneliner").splitlines()
    assert len(jobs) == 2 and all("JobState=COMPLETED" in job for job in jobs), jobs
    assert len({job.split("ArrayJobId=")[1].split()[0] for job in jobs}) == 1
    (parent,) = open_store(TrackingConfig(folder=str(tmp_path / "mlruns"))).runs(kind="sweep")
    assert (parent.status, parent.tags["children.finished"]) == ("FINISHED", "2")


def test_slurm_gives_out_devices_itself(tmp_path, slurm):
    parts = seen(
        tmp_path,
        "dtype=float32,bfloat16",
        "device_map=stream",
        *SMALL,
        CUDA_VISIBLE_DEVICES="4,6",
        **slurm.environment,
    )
    assert [part["CUDA_VISIBLE_DEVICES"] for part in parts] == ["4,6", "4,6"]


WAITING = """
import time
from pathlib import Path
from layerparity.ports.known.hf import HfPort

class WaitingPort(HfPort):
    def run(self, stage, given):
        Path(f"began-{self.assets.config.dtype.value}").touch()
        time.sleep(300)
"""


def test_ctrl_c_says_what_ends_the_jobs_that_slurm_has(tmp_path, slurm):
    store, note = interrupted(tmp_path, slurm)
    slurm.did(*note)
    awaited(lambda: not slurm.said("squeue", "--noheader"), slurm.logs)
    # srun is signalled as its part is, and kills the part at once where it is the first to know.
    assert {(run.status, run.tags["error"]) for run in ended(store)} <= {
        ("KILLED", "stopped by SIGTERM"),
        ("INTERRUPTED", "interrupted: its process is gone"),
    }


def test_a_part_that_slurm_signals_closes_its_run_itself(tmp_path, slurm):
    store, (scancel, *jobs) = interrupted(tmp_path, slurm)
    slurm.did(scancel, "--signal=TERM", *jobs)
    awaited(lambda: not slurm.said("squeue", "--noheader"), slurm.logs)
    assert {(run.status, run.tags["error"]) for run in ended(store)} == {
        ("KILLED", "stopped by SIGTERM")
    }


def interrupted(folder: Path, slurm: slurm_here.Slurm) -> tuple[Store, list[str]]:
    """Stop a sweep by Ctrl-C while both parts run: its store, and the command that it names."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "waiting_port_of_slurm.py").write_text(WAITING)
    words = [*TWO, *SMALL, "port._target_=waiting_port_of_slurm.WaitingPort"]
    command, options = asked(folder, *words, **slurm.environment)
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        awaited(lambda: len(list(folder.glob("began-*"))) == 2 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    (note,) = [line for line in out.splitlines() if "go on: scancel" in line]
    store = open_store(TrackingConfig(folder=str(folder / "mlruns")))
    assert [run.status for run in parts(store)] == ["RUNNING", "RUNNING"]
    return store, note.partition("go on: ")[2].split()[:2]


def parts(store: Store) -> list[StoredRun]:
    """Return the runs of the only sweep of a store."""
    (parent,) = store.runs(kind="sweep")
    return store.children(parent.id)


def ended(store: Store) -> list[StoredRun]:
    """Return the runs of the sweep, which are closed as soon as another command opens the store."""
    runs = parts(open_store(store.config))
    assert len(runs) == 2
    return runs
