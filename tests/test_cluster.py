"""Sweeps whose parts run in other processes, or on other nodes: nothing of a part is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import small_disk

from layerparity.cli import launchers
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.store import open_store

HERE = Path(__file__).resolve().parent
PARTS = ("backend=gpu", "device_map=cpu", "scope=single", "kind=candidate", "inputs=prompt")
NO_NAMESPACE = "this system forbids mount namespaces (unshare --map-root-user --mount)"


def sweep(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """Run a sweep in a fresh process: its exit status, what it printed and what it complained."""
    path = os.pathsep.join([str(HERE.parent / "src"), str(folder / "plugins"), *sys.path[1:]])
    kept = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    ended = subprocess.run(
        [sys.executable, "-m", "layerparity", "-m", *PARTS, *words],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def cells(out: str) -> list[list[str]]:
    """Return the rows of a table that was printed."""
    rows = [line.split("│")[1:-1] for line in out.splitlines()]
    return [[cell.strip() for cell in row] for row in rows if row]


@pytest.mark.skipif(not small_disk.can_mount(), reason=NO_NAMESPACE)
def test_parts_with_a_tmp_of_their_own_are_heard(tmp_path):
    plugin = tmp_path / "plugins" / "hydra_plugins" / "own_tmp"
    plugin.mkdir(parents=True)
    shutil.copy(HERE / "own_tmp_launcher.py", plugin / "launcher.py")
    (plugin / "__init__.py").touch()
    (tmp_path / "tmp").mkdir()
    code, out, err = sweep(
        tmp_path,
        "layer=0,9",
        "dtype=float32,bfloat16",
        "hydra/launcher=own_tmp",
        TMPDIR=str(tmp_path / "tmp"),
        DIES="3",
    )
    assert code == 2, out + err
    assert "2 of 4 parts finished" in out, out + err
    refused, silent = cells(out)
    assert refused[:2] == ["layer=9 dtype=float32", "REFUSED"]
    assert "layer=9 is out of range" in refused[2]
    assert silent[:2] == ["layer=9 dtype=bfloat16", "LEFT NO WORD"]
    words = " ".join([*PARTS, "layer=0,9", "dtype=float32,bfloat16", "reuse=true"])
    assert out.splitlines()[-1] == f"next:   python run.py -m {words}"
    (parent,) = open_store(TrackingConfig(folder=str(tmp_path / "mlruns"))).runs(kind="sweep")
    tags = {name: parent.tags[f"children.{name}"] for name in ("finished", "refused")}
    assert (parent.status, tags) == ("FAILED", {"finished": "2", "refused": "1"})
    assert parent.tags["children.left_no_word"] == "1"
    assert not list(tmp_path.rglob(".endings-*")), "what parts left is removed when it was read"


def side_by_side(folder: Path) -> list[tuple[int, int]]:
    """Return the pairs of a sweep's parts, by their order, that ran at the same time."""
    store = open_store(TrackingConfig(folder=str(folder / "mlruns")))
    (parent,) = store.runs(kind="sweep")
    client = store._connection.client
    times = [client.get_run(child.id).info for child in store.children(parent.id)]
    return [
        (number, later)
        for (number, one), (later, other) in combinations(enumerate(times), 2)
        if one.start_time < other.end_time and other.start_time < one.end_time
    ]


FOUR = ("layer=0", "dtype=float32,bfloat16", "capture=default,components")


def test_joblib_runs_parts_side_by_side(tmp_path):
    code, out, err = sweep(tmp_path, *FOUR, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert code == 0, out + err
    assert "4 of 4 parts finished" in out
    assert side_by_side(tmp_path), "parts of one process never overlap"


def without(package: str, monkeypatch) -> None:
    """Hide a package of Hydra's plugins."""
    found = launchers.find_spec
    hidden = f"hydra_plugins.{package}"
    monkeypatch.setattr(launchers, "find_spec", lambda name: name != hidden and found(name))


@pytest.mark.parametrize(
    ("launcher", "package", "extra"),
    [
        ("joblib", "hydra_joblib_launcher", "joblib"),
        ("submitit_local", "hydra_submitit_launcher", "slurm"),
        ("submitit_slurm", "hydra_submitit_launcher", "slurm"),
    ],
)
def test_a_launcher_that_is_not_installed_costs_one_line(
    cli, tmp_path, monkeypatch, launcher, package, extra
):
    without(package, monkeypatch)
    ended = cli("-m", *PARTS, "layer=0,1", f"hydra/launcher={launcher}")
    assert (ended.exit, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert package.replace("_", "-") in line
    assert line.endswith(f"pip install 'layerparity[{extra}]'.")
    assert list(tmp_path.iterdir()) == [], "no store, no parent run"


def test_slurm_without_its_commands_costs_one_line(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "find_spec", lambda name: True)
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent))
    ended = cli("-m", *PARTS, "layer=0,1", "hydra/launcher=submitit_slurm")
    assert (ended.exit, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert "Slurm's srun, not found on PATH" in line and "submitit_local" in line
    assert not (tmp_path / "mlruns").exists()


def test_submitit_local_runs_parts_side_by_side(tmp_path):
    pytest.importorskip("submitit", reason="the extra slurm is not installed: make test brings it")
    code, out, err = sweep(tmp_path, *FOUR, "hydra/launcher=submitit_local")
    assert code == 0, out + err
    assert "4 of 4 parts finished" in out
    assert side_by_side(tmp_path), "parts of one process never overlap"
