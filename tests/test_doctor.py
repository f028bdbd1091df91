"""The doctor: each check on a machine that has the thing, lacks it, or has it broken."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folders
import pytest
import torch
from conftest import ROOT, Ended
from safetensors.torch import load_file, save_file

from layerparity.backends.known.neuron import Compile
from layerparity.doctor import base, checkpoint, disk, gpus, machine, packages
from layerparity.doctor.base import Check, Result, State
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.machine import memory as _control_groups
from layerparity.machine import memory as _host_memory
from layerparity.machine import neuron as examined
from layerparity.machine import neuron_flavour, nvidia, probe
from layerparity.model.tokenizer import load_tokenizer
from layerparity.settings.model import ModelSettings
from layerparity.settings.tracking import TrackingConfig

Lines = dict[str, Result]
# Beside a GPU, a fork of a process that has torch is not what a user's command starts.
beside_a_gpu = (
    pytest.mark.fresh_interpreter if Path("/dev/nvidiactl").exists() else lambda test: test
)
TINY = ROOT / "checkpoints" / "tiny_minimax_m2"
GPU = {"name": "NVIDIA H200", "free": 140e9, "total": 141e9}
FACTS = {"version": "2.9.1+cu128", "cuda": "12.8", "nccl": "2.27.5", "threads": 2, "gpus": []}
# As nvidia-smi writes it, in colour on a terminal.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def settings(**changes: Any) -> Any:
    """What the checks read of a configuration."""
    model = ModelSettings(name="m", path=str(TINY))
    usual = {
        "backend": SimpleNamespace(name="gpu", compile=False),
        "device_map": SimpleNamespace(strategy="auto"),
        "model": model,
        "port": {"_target_": "layerparity.ports.known.hf.HfPort"},
        "tp_degree": 1,
        "tracking": TrackingConfig(folder="mlruns"),
        "threads": None,
    }
    return SimpleNamespace(**{**usual, **changes})


NEURON = SimpleNamespace(name="neuron", runtime=examined.RuntimeChoice.auto)


def checks() -> dict[str, Check]:
    files = (registry.load("doctor", name) for name in registry.names("doctor"))
    return {check.name: check for file in files for check in file.CHECKS}


def lines(name: str, **changes: Any) -> Lines:
    """Return the lines of one check, by what they are about."""
    return {result.check: result for result in checks()[name].look(settings(**changes))}


@pytest.fixture
def torch_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def say(shown: int = 0, **facts: Any) -> None:
        monkeypatch.setattr(probe, "torch_facts", lambda: {**FACTS, **facts})
        monkeypatch.setattr(nvidia, "gpu_names", lambda: ["NVIDIA H200"] * shown)

    return say


@beside_a_gpu
def test_the_whole_of_it(cli: Callable[..., Ended]) -> None:
    ended = cli("job=doctor")
    assert ended.exit == 0, ended.out + ended.err
    for check in ("packages", "torch", "gpu", "memory", "disk speed", "store", "tokenizer"):
        assert f"│ {check}" in ended.out
    assert "no problems" in ended.out
    assert list(Path.cwd().iterdir()) == []


def test_a_problem_is_the_exit_status(
    cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = registry.names
    monkeypatch.setattr(registry, "names", lambda p: ["checkpoint"] if p == "doctor" else real(p))
    ended = cli("job=doctor", 'model.path="/nowhere[xla]"')
    # 1 is a comparison that failed.
    assert ended.exit == 5
    assert "│ checkpoint │ problem │" in ended.out
    assert "│ tokenizer  │ problem │" in ended.out
    assert "2 problems and no warnings in 2 lines" in ended.out
    # Brackets are no markup.
    assert "/nowhere[xla]" in ended.out
    assert "give model.path=<folder>" in ended.out


def test_it_imports_nothing_heavy_itself_and_works_bare(tmp_path: Path) -> None:
    """No torch_xla, no GPU; nothing that is asked in a child is in this process."""
    code = f"""
import importlib.machinery, json, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch_xla" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
sys.argv = ["run.py", "job=doctor"]
sys.path.insert(0, {str(ROOT / "src")!r})
from layerparity.cli.door import main
code = main()
heavy = {{"torch", "transformers", "torch_xla", "mlflow"}} & set(sys.modules)
print(json.dumps([code, sorted(heavy)]), file=sys.stderr)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert json.loads(ended.stderr.splitlines()[-1]) == [0, []], ended.stdout + ended.stderr
    assert "only backend=neuron needs it" in ended.stdout


def test_every_check_is_found_and_has_its_place() -> None:
    known = checks()
    assert {"python", "packages", "torch", "neuron", "gpus", "links", "nccl"} <= known.keys()
    assert all(isinstance(each, Check) for each in known.values())
    rows = (ROOT / "docs/how-to/doctor.md").read_text().splitlines()
    named = {name for row in rows if row.startswith("| ") for name in row.split("|")[1].split(", ")}
    about = {"neuron": "neuron devices", "threads": "cpu threads"}
    assert {about.get(name, name) for name in known} <= {name.strip() for name in named}


def test_a_child_that_crashes_or_hangs_takes_nobody_along(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import os, time\ndef crash(): os.abort()\ndef wait(): time.sleep(60)\n"
        "def fail(): raise OSError('undefined symbol: _ZN5torch')\n"
        "def fine(*words): print('chatter'); return list(words)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(probe.NoAnswerError, match="SIGABRT"):
            probe.ask("bad", "crash")
        with pytest.raises(probe.NoAnswerError, match="no answer in 1 s") as slow:
            probe.ask("bad", "wait", timeout_s=1)
        assert slow.value.too_slow
        with pytest.raises(probe.NoAnswerError, match="undefined symbol"):
            probe.ask("bad", "fail")
        assert probe.ask("bad", "fine", "a", "it's") == ["a", "it's"]
    finally:
        sys.path.remove(str(tmp_path))


def test_the_known_good_set_is_the_pinned_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pair = {f"{name.replace('-', '_')}=={version}" for name, version in packages.PAIR.items()}
    # A marker says where torch_xla has wheels.
    listed = project["optional-dependencies"]["xla"]
    assert {each.partition(";")[0] for each in listed} == pair
    known = packages.known_good()
    asked = {each.name for each in packages.requirements()}
    assert asked == {line.split(">")[0].split("=")[0] for line in project["dependencies"]}
    assert {name.replace("_", "-") for name in asked} <= known.keys()


@pytest.mark.parametrize(
    ("version", "state", "says"),
    [
        ("5.23.0", None, ""),
        ("5.23.0+local", None, ""),
        ("5.24.0", State.WARNING, "5.24.0; 5.23.0 is what is tested"),
        ("4.57.1", State.PROBLEM, "4.57.1, and >=5.18 is needed"),
        (None, State.PROBLEM, "is not installed"),
    ],
)
def test_packages(
    monkeypatch: pytest.MonkeyPatch, version: str | None, state: State | None, says: str
) -> None:
    real = packages.installed
    monkeypatch.setattr(
        packages, "installed", lambda name: version if name == "transformers" else real(name)
    )
    found = lines("packages")
    assert found["packages"].state is State.OK
    assert ("transformers" in found) is (state is not None)
    if state is not None:
        assert (found["transformers"].state, found["transformers"].found) == (state, says)
        assert found["transformers"].cure == "pip install transformers==5.23.0"


def test_other_packages_beneath_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packages.installed
    monkeypatch.setattr(packages, "installed", lambda n: "1.0" if n == "pandas" else real(n))
    beneath = lines("packages")["packages beneath"]
    assert "pandas 1.0 (" in beneath.found
    assert "constraints.txt" in beneath.cure


@pytest.mark.parametrize(
    ("torch", "xla", "answer", "state", "says"),
    [
        ("2.9.1", "2.9.0", {"device": "xla:0"}, State.OK, "imports with torch 2.9.1"),
        ("2.10.0", "2.9.0", {}, State.PROBLEM, "2.9.0 is made for torch 2.9, and torch is 2.10.0"),
        ("2.9.1", "2.9.0", None, State.PROBLEM, "does not import: undefined symbol"),
        ("2.9.1", "2.9.0", True, State.PROBLEM, "2.9.0: its import gave no answer in 180 s"),
        ("2.8.0", "2.8.1", {"device": "xla:0"}, State.WARNING, "2.9.0 is what is tested"),
    ],
)
def test_torch_and_torch_xla(
    monkeypatch: pytest.MonkeyPatch,
    torch_says: Callable[..., None],
    torch: str,
    xla: str,
    answer: dict[str, str] | bool | None,
    state: State,
    says: str,
) -> None:
    def ask(module: str, function: str) -> Any:
        if answer is None:
            raise probe.NoAnswerError("undefined symbol")
        if answer is True:
            raise probe.NoAnswerError("no answer in 180 s", too_slow=True)
        return answer

    torch_says(version=torch)
    monkeypatch.setattr(probe, "ask", ask)
    here = {"torch_xla": object()}
    monkeypatch.setattr(packages.importlib.util, "find_spec", here.get)
    monkeypatch.setattr(packages, "installed", {"torch": torch, "torch_xla": xla}.get)
    found = lines("torch")["torch_xla"]
    assert found.state is state
    assert says in found.found
    assert ("busy" in found.cure) is (answer is True), "a reinstallation makes no disk faster"


def test_without_torch_xla_only_the_neuron_backend_minds(
    monkeypatch: pytest.MonkeyPatch, torch_says: Callable[..., None]
) -> None:
    torch_says()
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert lines("torch")["torch_xla"].state is State.OK
    found = lines("torch", backend=NEURON)["torch_xla"]
    assert found.state is State.PROBLEM
    assert "torch_xla==2.9.0" in found.cure


def test_the_native_runtimes_torch_is_the_pinned_one() -> None:
    assert f"torch=={packages.NATIVE} " in (ROOT / "Makefile").read_text()


def test_a_newer_torch_without_torch_xla_is_the_native_runtimes(
    monkeypatch: pytest.MonkeyPatch, torch_says: Callable[..., None]
) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    version = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(packages, "installed", version.get)
    monkeypatch.setattr(neuron_flavour, "version_of", version.get)
    torch_says(version="2.13.0+cpu", cuda="")
    found = lines("torch")
    assert (found["torch"].state, found["torch"].found) == (
        State.OK,
        "2.13.0+cpu, built without CUDA",
    )
    assert "the native runtime" in found["torch_xla"].found
    needed = lines("torch", backend=NEURON)["torch_xla"]
    assert needed.state is State.PROBLEM
    assert "use backend.runtime=native_cpu" in needed.cure
    native = SimpleNamespace(
        name="neuron", runtime=examined.RuntimeChoice.native_cpu, compile=Compile.lazy
    )
    assert lines("torch", backend=native)["torch_xla"].state is State.OK
    version["torch"] = "2.14.0"
    torch_says(version="2.14.0", cuda="")
    other = lines("torch")["torch"]
    assert other.state is State.WARNING
    assert "2.13.0 is what is tested, for the native runtime" in other.found
    assert other.cure == "pip install torch==2.13.0"


@pytest.mark.parametrize(
    ("python", "state", "says"),
    [
        ((3, 12, 1), State.OK, "made for 3.12 to 3.14, of which none is tested here"),
        ((3, 11, 9), State.WARNING, "AWS's native flavour is made for 3.12 to 3.14"),
    ],
)
def test_the_native_package_has_pythons_of_its_own(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, ...], state: State, says: str
) -> None:
    package = neuron_flavour.Installed(neuron_flavour.Flavour.NATIVE, "2.13.3.0")
    monkeypatch.setattr(neuron_flavour, "installed", lambda: package)
    monkeypatch.setattr(packages.sys, "version_info", python)
    (found,) = packages.check_python(settings())
    assert (found.state, says in found.found) == (state, True), found
    assert "use Python 3.11" not in found.cure
    assert packages.tested_torch() == "2.13.0"


def test_what_is_found_of_neuron_and_its_cure_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    found = lines("neuron", backend=NEURON)["neuron devices"]
    assert (found.state, found.found) == (State.PROBLEM, "torch_xla is not installed")
    assert found.cure == f"{examined.GET_XLA}."
    assert lines("neuron")["neuron devices"].found == "none; torch_xla is not installed"
    assert examined.detect().reason == f"torch_xla is not installed: {examined.GET_XLA}."


def test_placeholders_of_aws_packages_are_recognised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch_neuronx").mkdir()
    (tmp_path / "torch_neuronx" / "__init__.py").write_text("raise RuntimeError('get it at AWS')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert examined.packages() == {"torch_neuronx": False}
    found = lines("neuron")
    assert found["torch_neuronx"].state is State.WARNING
    assert "placeholder" in found["torch_neuronx"].found
    assert "none installed" in found["neuron flavour"].found


@pytest.mark.parametrize(
    ("body", "state", "says"),
    [
        ("def trace(): ...", State.OK, "XLA flavour"),
        ("__version__ = '2.13'", State.PROBLEM, "torch_neuronx 2.13 is the native flavour"),
        ("import nothing_of_the_kind", State.PROBLEM, "does not import"),
    ],
)
def test_flavours_of_torch_neuronx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, state: State, says: str
) -> None:
    (tmp_path / "torch_neuronx.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = lines("neuron")["neuron flavour"]
    assert found.state is state, found
    assert says in found.found
    assert not (set(examined.PACKAGES) & set(sys.modules))


def test_neuron_devices_without_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "neuron0").touch()
    monkeypatch.setattr(examined, "DEVICE_FILES", tmp_path)
    found = lines("neuron")
    assert found["neuron flavour"].state is State.PROBLEM
    assert "AWS's own package index" in found["neuron flavour"].cure


def test_gpus(torch_says: Callable[..., None]) -> None:
    torch_says()
    assert "runs on the CPU" in lines("gpus")["gpus"].found
    asked = SimpleNamespace(strategy="cuda:0")
    assert lines("gpus", device_map=asked)["gpus"].state is State.PROBLEM
    torch_says(2, gpus=[GPU, {**GPU, "free": 20e9}])
    found = lines("gpus")
    assert (found["gpu 0"].state, found["gpu 1"].state) == (State.OK, State.WARNING)
    assert found["gpu 0"].found == "NVIDIA H200, 140.00 GB free of 141.00 GB"
    torch_says(2, gpus=[GPU])
    assert "shows 2, torch can use 1" in lines("gpus")["gpus"].found
    torch_says(1, cuda=None)
    assert "without CUDA" in lines("gpus")["gpus"].found
    assert lines("gpus")["gpus"].state is State.PROBLEM


def test_links(monkeypatch: pytest.MonkeyPatch, torch_says: Callable[..., None]) -> None:
    torch_says(1)
    assert "fewer than two" in lines("links")["links"].found
    torch_says(3)
    monkeypatch.setattr(gpus, "_topology", lambda: "")
    assert lines("links")["links"].state is State.WARNING
    assert gpus.pairs_of(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    monkeypatch.setattr(gpus, "_topology", lambda: TOPOLOGY)
    found = lines("links")["links"]
    assert found.state is State.OK
    assert "NVLink (18 lanes): 1" in found.found
    assert "PCIe across CPUs: 1" in found.found


def test_nccl_and_triton(monkeypatch: pytest.MonkeyPatch, torch_says: Callable[..., None]) -> None:
    torch_says(nccl="")
    assert lines("nccl")["nccl"].state is State.OK
    torch_says(2, nccl="")
    assert lines("nccl")["nccl"].state is State.WARNING
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: None)
    assert lines("triton")["triton"].state is State.WARNING
    compiled = SimpleNamespace(name="gpu", compile=True)
    assert lines("triton", backend=compiled)["triton"].state is State.PROBLEM
    torch_says(0)
    assert lines("triton", backend=compiled)["triton"].state is State.OK


@pytest.mark.parametrize(
    ("free", "state"), [(8e9, State.OK), (2e9, State.WARNING), (5e8, State.PROBLEM)]
)
def test_memory(monkeypatch: pytest.MonkeyPatch, free: float, state: State) -> None:
    monkeypatch.setattr(_control_groups, "memory_left", lambda: int(free))
    found = lines("memory")["memory"]
    limited = "(the limit on its control group leaves no more)" in found.found
    assert (found.state, limited) == (state, True)
    assert found.cure.startswith("raise the limit on") == (state is not State.OK)


def test_a_limit_of_the_shell_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    limit = _host_memory._status_bytes("VmData") + 10**9
    monkeypatch.setattr(
        resource, "getrlimit", lambda k: (limit, limit) if k == resource.RLIMIT_DATA else real(k)
    )
    found = lines("memory")["memory"]
    assert "(ulimit -d leaves no more)" in found.found
    assert found.state in (State.WARNING, State.PROBLEM) and "raise ulimit -d" in found.cure
    assert 0 < _host_memory.free_host_memory() <= 10**9


def test_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the doctor and for a run alike, those of the groups above counted."""
    own = tmp_path / "groups" / "outer" / "inner"
    own.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/outer/inner\n")
    monkeypatch.setattr(_control_groups, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(_control_groups, "OWN", tmp_path / "self")
    free = _host_memory.free_host_memory()
    assert _control_groups.memory_left() is None and free > 10**6
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text("2000\n")
    (own.parent / "memory.current").write_text("900\n")
    stat = "anon 600\ninactive_file 150\nactive_file 50\nslab_reclaimable 7\nshmem 90\n"
    (own.parent / "memory.stat").write_text(stat)
    assert _control_groups.memory_left() == _host_memory.free_host_memory() == 1307
    assert lines("memory")["memory"].found.startswith("1.31 kB free of")
    assert machine.usable_cpus() == len(os.sched_getaffinity(0))
    (own / "cpu.max").write_text("100000 100000\n")
    assert machine.usable_cpus() == 1
    # A container that sees its own group as the root, by the name that the host has for it.
    (tmp_path / "self").write_text("0::/system.slice/of-the-host\n")
    (tmp_path / "groups/memory.max").write_text("500\n")
    (tmp_path / "groups/memory.current").write_text("100\n")
    assert _host_memory.free_host_memory() == 400


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert lines("threads")["cpu threads"].state is State.OK
    assert "give 2 or fewer" in lines("threads", threads=8)["cpu threads"].cure
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert lines("threads")["cpu threads"].cure == "unset OMP_NUM_THREADS"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    assert "9 threads want them" in lines("threads")["cpu threads"].found


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "SAMPLE", 1 << 20)
    here = TrackingConfig(folder=str(tmp_path / "not" / "yet"))
    found = lines("disk", tracking=here)
    assert "reads" in found["disk speed"].found
    assert list(tmp_path.iterdir()) == []
    usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
    for free, state in ((2e9, State.WARNING), (1e6, State.PROBLEM)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, n=free: usage(1e12, 1e12, n))
        assert lines("disk", tracking=here)["disk"].state is state
    monkeypatch.undo()
    monkeypatch.setattr(disk, "kind_of", lambda folder: "tmpfs")
    assert "which is memory" in lines("disk", tracking=here)["disk"].found


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path, size: int) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "speed_of_folder", refused)
    found = lines("disk")["disk speed"]
    assert found.state is State.PROBLEM
    assert "Permission denied" in found.found


def test_the_embedded_store(tmp_path: Path) -> None:
    from layerparity.tracking.opening import open_store

    kept = TrackingConfig(folder=str(tmp_path / "kept"))
    assert "the first run makes it" in lines("store", tracking=kept)["store"].found
    assert not kept.root.exists()
    open_store(kept)
    found = lines("store", tracking=kept)["store"].found
    assert "opens and can be written to, 0 runs, schema " in found
    # MLflow looks at a database's schema once in a process.
    other = TrackingConfig(folder=shutil.copytree(kept.root, tmp_path / "other"))
    with closing(sqlite3.connect(other.root / "mlflow.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0123456789ab'")
    with pytest.raises(UserError, match="version of MLflow"):
        lines("store", tracking=other)
    (kept.root / "mlflow.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(UserError, match="cannot be used"):
        lines("store", tracking=kept)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        lines("store", tracking=TrackingConfig(folder=str(tmp_path / "file" / "runs")))


def test_a_locked_store_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from layerparity.tracking import database, health

    (tmp_path / "mlflow.db").touch()
    monkeypatch.setattr(health, "_LOCK_SECONDS", 0.1)
    with database.locked(tmp_path), pytest.raises(UserError, match="Another process holds"):
        lines("store", tracking=TrackingConfig(folder=str(tmp_path)))


def test_a_server_that_does_not_answer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gone = TrackingConfig(name="server", uri=f"http://127.0.0.1:{port}", timeout_s=1)
    with pytest.raises(UserError, match="does not answer: start it"):
        lines("store", tracking=gone)


def test_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "minimax_m2, 6 layers, 351 tensors in 1 file" in lines("checkpoint")["checkpoint"].found
    monkeypatch.setattr(checkpoint, "_WORTH_READING", 1)
    assert "GB/s from model.safetensors" in lines("checkpoint")["checkpoint speed"].found
    shutil.copytree(TINY, tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    model = settings().model
    model.path = str(tmp_path / "cut")
    found = lines("checkpoint", model=model)["checkpoint"]
    assert found.state is State.PROBLEM and "it is cut off or damaged" in found.found
    command = f"python run.py job=audit model.path={tmp_path / 'cut'}"
    assert found.cure == f"'{command}' lists all that is wrong with it"
    model = SimpleNamespace(name="m", path=None, shipped=None, architecture={"model_type": "x"})
    assert "without weights" in lines("checkpoint", model=model)["checkpoint"].found
    assert lines("tokenizer", model=model) == {}


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def other_quantization(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(values | {"quantization_config": {"quant_method": "hqq"}})
    )


def blocks_in_words(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_hidden_layers": "six"}))


def no_scales(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (broken_index, "cannot be read as JSON"),
        (other_quantization, "quantised by hqq, which is not read"),
        (blocks_in_words, "num_hidden_layers=six, which is no number of blocks"),
        (no_scales, "without its scales it is noise"),
    ],
)
def test_what_a_run_would_refuse_of_a_checkpoint_is_a_problem(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """The whole message, and the command that lists the rest: no cure is cut out of it."""
    folder = Path(shutil.copytree(TINY, tmp_path / "copy"))
    damage(folder)
    model = settings().model
    model.path = str(folder)
    found = lines("checkpoint", model=model)
    assert found["checkpoint"].state is State.PROBLEM
    assert says in found["checkpoint"].found
    assert "job=audit" in found["checkpoint"].cure


@pytest.mark.parametrize(
    ("name", "changes", "found", "cure"),
    [
        (
            "store",
            {"name": "server", "uri": "http://me:mine@127.0.0.1"},
            "tracking.uri holds a login",
            "leave it out, and set MLFLOW_TRACKING_USERNAME",
        ),
        ("store", {"folder": "a%b"}, "The path of a store must be free of", "rename it"),
        ("checkpoint", {"config.json": None}, "has no config.json", "give another model.path"),
        ("checkpoint", {"model.safetensors": None}, "holds no .safetensors", "give another model"),
        ("tokenizer", {"tokenizer.json": "{"}, "has no tokenizer that can be read", "inputs=token"),
    ],
)
def test_a_cure_is_not_shown_as_what_was_found(
    name: str, changes: dict[str, str | None], found: str, cure: str, tmp_path: Path
) -> None:
    asked = settings()
    if name == "store":
        asked.tracking = TrackingConfig(**{"folder": str(tmp_path), **changes})
    else:
        folder = shutil.copytree(TINY, tmp_path / "copy")
        for file, text in changes.items():
            (folder / file).unlink()
            if text is not None:
                (folder / file).write_text(text)
        asked.model.path = str(folder)
    (line,) = base._results(checks()[name], asked)
    assert line.state is not State.OK
    assert found in line.found and cure in line.cure
    assert line.cure != base._SEE and line.cure not in line.found


def test_sizes_that_the_weights_contradict_are_a_problem_and_build_nothing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    asked = settings()
    asked.model.path = str(folder)
    for name in ("checkpoint", "tokenizer"):
        (line,) = base._results(checks()[name], asked)
        assert line.state is State.PROBLEM
        assert "num_hidden_layers=1000000000, and the weights have 351 tensors" in line.found


def test_a_vocabulary_of_nothing_is_no_tokenizer(tmp_path: Path) -> None:
    """transformers makes an empty one for Qwen where the files are missing."""
    with pytest.raises(UserError, match="its vocabulary is empty"):
        load_tokenizer(folders.qwen3(tmp_path / "qwen3"))


def test_a_folder_without_a_tokenizer_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = settings().model
    model.path = str(tmp_path)
    found = lines("tokenizer", model=model)["tokenizer"]
    assert found.state is State.WARNING
    assert found.found.startswith(str(tmp_path))
    assert "inputs=tokens" in found.cure
