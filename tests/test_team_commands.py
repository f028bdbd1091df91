"""A team's store from the command line: a sweep on PostgreSQL and S3, and a killed server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from team import Team, missing

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
ONE = ("backend=gpu", "device_map=cpu", SMALL)
# A golden of which only the blocks' own floors are read.
GOLDEN = (*ONE, "reference.chained=false", "reference.components=false", "name=the-one")
WAIT_SECONDS = 200
GATED = """
import time
from pathlib import Path
from layerparity.ports.known.hf import HfPort

class GatedPort(HfPort):
    def run(self, stage, given):
        if stage in ("lm_head", "layers.1"):
            Path("at-the-gate").touch()
            while not Path("open").exists():
                time.sleep(0.05)
        return super().run(stage, given)
"""


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team()
    try:
        team.start()
        yield team
    finally:
        team.close()


class Shell:
    """A user's shell in a folder, with the team's server."""

    def __init__(self, team: Team, folder: Path, experiment: str) -> None:
        self.folder = folder
        self.place = [
            "tracking=server",
            f"tracking.uri={team.address}",
            f"tracking.experiment={experiment}",
            "tracking.timeout_s=30",
        ]
        path = os.pathsep.join([str(ROOT / "src"), str(folder), *sys.path[1:]])
        self.environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        self.store: Store = open_store(
            TrackingConfig("server", team.address, str(folder / "mlruns"), experiment=experiment)
        )

    def begin(self, *words: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "layerparity", *words, *self.place]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, **pipes)

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        process = self.begin(*words)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == code, out + err
        assert "Traceback" not in err
        return out, err


def at_the_gate(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a command computes what it stops at."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (folder / "at-the-gate").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sweep_and_its_comparison(team: Team, tmp_path: Path) -> None:
    shell = Shell(team, tmp_path, "swept")
    shell.run(*GOLDEN)
    words = ("-m", *ONE, "kind=candidate", "scope=single", "layer=range(0,3)")
    out, _ = shell.run(*words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "name=by-layer")
    assert "3 of 3 parts finished" in out
    (parent,) = shell.store.runs(kind="sweep")
    children = shell.store.children(parent.id)
    assert (parent.status, len(children)) == ("FINISHED", 3)
    # What was uploaded is nowhere else.
    left = {file.relative_to(tmp_path / "mlruns") for file in tmp_path.rglob("*.safetensors")}
    assert {file.parts[0] for file in left} == {"cache"}, "the golden's inputs were fetched"
    objects = team.s3().list_objects_v2(Bucket="runs", MaxKeys=1000)["Contents"]
    assert sum(any(child.id in each["Key"] for each in objects) for child in children) == 3
    # Another machine: nothing of the runs is in its folder.
    (tmp_path / "there").mkdir()
    there = Shell(team, tmp_path / "there", "swept")
    out, _ = there.run("job=compare", "candidate=by-layer")
    assert "21 pass = 21 sites asked for" in out
    assert "3 of 6 blocks compared" in out


def test_a_server_that_is_killed_in_the_middle_of_a_command(team: Team, tmp_path: Path) -> None:
    shell = Shell(team, tmp_path, "killed")
    shell.place[-1] = "tracking.timeout_s=5"
    shell.run(*GOLDEN)
    (tmp_path / "gated_port_of_team.py").write_text(GATED)
    words = (*ONE, "kind=candidate", "port._target_=gated_port_of_team.GatedPort", "name=cut")
    process = shell.begin(*words)
    at_the_gate(process, tmp_path)
    team.kill("mlflow")
    try:
        (tmp_path / "open").touch()
        out, err = process.communicate(timeout=WAIT_SECONDS)
    finally:
        team.start_mlflow()
    print(out, err)
    assert process.returncode == 2, out + err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("layerparity:")]
    assert len(lines) == 1 and "does not answer" in lines[0], err
    (cut,) = [run for run in shell.store.runs(kind="candidate") if run.name == "cut"]
    assert not cut.finished and not cut.file("manifest.json").exists()


def test_a_server_that_is_killed_in_the_middle_of_a_sweep(team: Team, tmp_path: Path) -> None:
    """Each part that it leaves costs a line; once it is back, what was finished is taken."""
    shell = Shell(team, tmp_path, "cut-sweep")
    shell.place[-1] = "tracking.timeout_s=5"
    (tmp_path / "gated_port_of_team.py").write_text(GATED)
    words = ("-m", *ONE, "kind=candidate", "scope=single", "layer=0,1,2", "inputs=random")
    words += ("port._target_=gated_port_of_team.GatedPort",)
    process = shell.begin(*words)
    at_the_gate(process, tmp_path)
    team.kill("mlflow")
    try:
        (tmp_path / "open").touch()
        out, err = process.communicate(timeout=WAIT_SECONDS)
    finally:
        team.start_mlflow()
    print(out, err)
    assert process.returncode == 2, out + err
    lines = err.strip().splitlines()
    assert 0 < len(lines) <= 3 and all("does not answer: start it" in line for line in lines)
    out, _ = shell.run(*words, "reuse=true")
    assert out.count(", reused") == 1 and "3 of 3 parts finished" in out
    again, cut = shell.store.runs(kind="sweep")
    assert (cut.status, again.status) == ("INTERRUPTED", "FINISHED")
    assert [run.status for run in shell.store.children(again.id)] == ["FINISHED"] * 3
    assert not list((tmp_path / "mlruns" / "spool").glob("[0-9a-f]*"))
