"""Sweeps whose parts run in other processes, or on other nodes: nothing of a part is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import small_disk

from layerparity.cli import launchers
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

HERE = Path(__file__).resolve().parent
PARTS = ("backend=gpu", "device_map=cpu", "scope=single", "kind=candidate", "inputs=prompt")
OWN_TMP = "hydra/launcher=own_tmp"
WAIT_SECONDS = 200
NO_NAMESPACE = "this system forbids mount namespaces (unshare --map-root-user --mount)"


def asked(folder: Path, *words: str, **environment: str) -> tuple[list[str], dict[str, Any]]:
    """Return the command of a sweep, and how it is run as a process: its output is kept."""
    path = os.pathsep.join([str(HERE.parent / "src"), str(folder / "plugins"), *sys.path[1:]])
    kept = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    chosen = {word.partition("=")[0] for word in words}
    own = [word for word in PARTS if word.partition("=")[0] not in chosen]
    if "backend=neuron" in words:
        own.remove("device_map=cpu")
    command = [sys.executable, "-m", "layerparity", "-m", *own, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return command, {"cwd": folder, "env": {**kept, **environment}, **pipes}


def sweep(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """Run a sweep in a fresh process: its exit status, what it printed and what it complained."""
    command, options = asked(folder, *words, **environment)
    ended = subprocess.run(command, check=False, **options)
    return ended.returncode, ended.stdout, ended.stderr


def cells(out: str) -> list[list[str]]:
    """Return the rows of a table that was printed."""
    rows = [line.split("│")[1:-1] for line in out.splitlines()]
    return [[cell.strip() for cell in row] for row in rows if row]


def own_tmp(folder: Path) -> None:
    """Let Hydra find the launcher whose parts have a /tmp of their own."""
    plugin = folder / "plugins" / "hydra_plugins" / "own_tmp"
    plugin.mkdir(parents=True)
    shutil.copy(HERE / "own_tmp_launcher.py", plugin / "launcher.py")
    (plugin / "__init__.py").touch()
    (folder / "tmp").mkdir()


@pytest.mark.skipif(not small_disk.can_mount(), reason=NO_NAMESPACE)
def test_parts_with_a_tmp_of_their_own_are_heard(tmp_path):
    own_tmp(tmp_path)
    code, out, err = sweep(
        tmp_path,
        "layer=0,99",
        "dtype=float32,bfloat16",
        OWN_TMP,
        TMPDIR=str(tmp_path / "tmp"),
        DIES="3",
    )
    assert code == 2, out + err
    assert "2 of 4 parts finished" in out, out + err
    refused, silent = cells(out)
    assert refused[:2] == ["layer=99 dtype=float32", "REFUSED"]
    assert "layer=99 is out of range" in refused[2]
    assert silent[:2] == ["layer=99 dtype=bfloat16", "LEFT NO WORD"]
    words = " ".join([*PARTS, "layer=0,99", "dtype=float32,bfloat16", "reuse=true"])
    assert out.splitlines()[-2] == f"next:   python -m layerparity -m {words}"
    assert "still in it, and refused again" in out.splitlines()[-1]
    (parent,) = open_store(TrackingConfig(folder=str(tmp_path / "mlruns"))).runs(kind="sweep")
    tags = {name: parent.tags[f"children.{name}"] for name in ("finished", "refused")}
    assert (parent.status, tags) == ("FAILED", {"finished": "2", "refused": "1"})
    assert parent.tags["children.left_no_word"] == "1"
    assert not list(tmp_path.rglob(".endings-*")), "what parts left is removed when it was read"


@pytest.mark.skipif(not small_disk.can_mount(), reason=NO_NAMESPACE)
def test_a_launcher_that_raises_is_no_story_of_python(tmp_path):
    own_tmp(tmp_path)
    given = {"TMPDIR": str(tmp_path / "tmp"), "DIES": "1", "RAISES": "job 17 was lost\nno result"}
    code, out, err = sweep(tmp_path, "layer=0", "dtype=float32,bfloat16", OWN_TMP, **given)
    assert code == 2, out + err
    assert "Traceback" not in out + err
    (line,) = [each for each in err.splitlines() if each.startswith("layerparity:")]
    assert "lost 1 parts of the sweep (RuntimeError: job 17 was lost)" in line
    assert "1 of 2 parts finished" in out, "what the other part said is heard"
    (silent,) = cells(out)
    assert silent[:2] == ["dtype=bfloat16", "LEFT NO WORD"]
    (parent,) = open_store(TrackingConfig(folder=str(tmp_path / "mlruns"))).runs(kind="sweep")
    assert parent.status == "FAILED"


WAITING = """
import time
from pathlib import Path
from layerparity.ports.known.hf import HfPort

class WaitingPort(HfPort):
    def run(self, stage, given):
        Path(f"began-{self.assets.config.dtype.value}").touch()
        time.sleep(300)
"""


@pytest.mark.skipif(not small_disk.can_mount(), reason=NO_NAMESPACE)
def test_ctrl_c_in_a_terminal_stops_the_parts_of_other_processes(tmp_path):
    own_tmp(tmp_path)
    (tmp_path / "plugins" / "waiting_port_of_cluster.py").write_text(WAITING)
    words = ["layer=0", "dtype=float32,bfloat16", OWN_TMP]
    words += ["port._target_=waiting_port_of_cluster.WaitingPort"]
    command, options = asked(tmp_path, *words, TMPDIR=str(tmp_path / "tmp"))
    # A terminal sends it to all processes of the command.
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        awaited(lambda: len(list(tmp_path.glob("began-*"))) == 2 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, out + err
    assert "interrupted" in err.splitlines()[-1]
    store = open_store(TrackingConfig(folder=str(tmp_path / "mlruns")))
    (parent,) = store.runs(kind="sweep")
    assert parent.status == "KILLED"
    # A part may end a moment after the command.
    awaited(lambda: all(run.status != "RUNNING" for run in store.children(parent.id)))
    assert [run.status for run in store.children(parent.id)] == ["KILLED", "KILLED"]


def awaited(holds: Callable[[], bool], state: Callable[[], str] = str) -> None:
    """Wait until something holds; ``state`` says what there is instead when it never does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, state()
        time.sleep(0.1)


SEEN = """
import atexit, json, os, time
from pathlib import Path
from layerparity.ports.known.hf import HfPort

class SeenPort(HfPort):
    def run(self, stage, given):
        names = ("CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES")
        seen = {name: os.environ.get(name) for name in names} | {"began": time.time()}
        Path(f"seen-{os.getpid()}.json").write_text(json.dumps(seen))
        if os.environ.get("ALONE"):
            inside = Path(f"inside-{os.getpid()}")
            assert not set(Path().glob("inside-*")) - {inside}, "another part has not ended"
            if not inside.exists():
                inside.touch()
                atexit.register(inside.unlink)
                time.sleep(1)
            return super().run(stage, given)
        deadline = time.monotonic() + 120
        while len(list(Path().glob("seen-*"))) < 2:
            assert time.monotonic() < deadline, "no other process runs a part at the same time"
            time.sleep(0.05)
        return super().run(stage, given)
"""


def seen(folder: Path, *words: str, **environment: str) -> list[dict[str, Any]]:
    """Sweep with a port that notes which devices its process was shown, in order of time."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "seen_port_of_cluster.py").write_text(SEEN)
    words = ("layer=0", "port._target_=seen_port_of_cluster.SeenPort", *words)
    code, out, err = sweep(folder, *words, **environment)
    assert code == 0, out + err
    count = prod(word.count(",") + 1 for word in words)
    assert f"{count} of {count} parts finished" in out
    kept = [json.loads(file.read_text()) for file in folder.glob("seen-*.json")]
    return sorted(kept, key=lambda each: each["began"])


def test_each_process_beside_others_is_shown_a_gpu_of_its_own(tmp_path):
    words = ["dtype=float32,bfloat16", "capture=default,components", "device_map=stream"]
    words += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    parts = seen(tmp_path, *words, CUDA_VISIBLE_DEVICES="6,4,5")
    assert {part["CUDA_VISIBLE_DEVICES"] for part in parts} == {"6", "4"}, "four parts, two workers"


def test_a_part_waits_for_the_gpu_that_another_one_holds(tmp_path):
    words = ["dtype=float32,bfloat16", "device_map=stream", "hydra/launcher=submitit_local"]
    parts = seen(tmp_path, *words, CUDA_VISIBLE_DEVICES="7", ALONE="yes")
    assert [part["CUDA_VISIBLE_DEVICES"] for part in parts] == ["7", "7"]


def test_each_process_beside_others_is_shown_cores_of_its_own(tmp_path):
    """XLA:CPU, not Neuron: the variable is what a Neuron runtime would read."""
    words = ["backend=neuron", "tp_degree=2", "dtype=float32,bfloat16"]
    words += ["hydra/launcher=submitit_local"]
    parts = seen(tmp_path, *words, NEURON_RT_VISIBLE_CORES="2-6")
    assert {part["NEURON_RT_VISIBLE_CORES"] for part in parts} == {"2,3", "4,5"}


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
        ("slurm", "hydra_submitit_launcher", "slurm"),
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
    assert "Slurm's srun, not found on PATH" in line and "hydra/launcher=submitit_local" in line
    assert not (tmp_path / "mlruns").exists()


SBATCH = """#!/bin/sh
cp "$1" {folder}/script.sh
echo "sbatch: error: no partition here" >&2
exit 1
"""


def test_the_script_that_slurm_gets_asks_for_what_the_preset_says(tmp_path):
    """sbatch is a stand-in that keeps what it is given, and takes no job."""
    pytest.importorskip("submitit", reason="the extra slurm is not installed: make test brings it")
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH.format(folder=tmp_path)), ("srun", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    words = ["layer=0,1", "hydra/launcher=slurm", "hydra.launcher.partition=trn2"]
    code, out, err = sweep(tmp_path, *words, PATH=path)
    assert code == 2, out + err
    assert "Traceback" not in err and "no partition here" in err
    script = (tmp_path / "script.sh").read_text()
    for line in (
        "--array=0-1%2",
        "--cpus-per-task=8",
        "--mem=64GB",
        "--time=720",
        "--partition=trn2",
        "--job-name=layerparity",
    ):
        assert f"#SBATCH {line}\n" in script
    assert f"srun --unbuffered --output {tmp_path}" in script
