"""The doctor on Neuron machines that are made up of files and variables: there is none here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.doctor import neuron_stack
from layerparity.doctor.base import Result, State
from layerparity.ground.errors import UserError
from layerparity.machine import neuron, neuron_machine
from layerparity.machine.neuron_defaults import CHANGES, changed_between, sdk_of
from layerparity.machine.neuron_machine import instance_here, read_machine
from layerparity.machine.trainium import instance_of
from layerparity.settings.config import RunKind
from layerparity.settings.tracking import TrackingConfig

NEURON = SimpleNamespace(name="neuron", runtime=neuron.RuntimeChoice.auto)
DPKG = """\
Package: aws-neuronx-collectives
Status: install ok installed
Version: 2.35.43.0-1

Package: aws-neuronx-runtime-lib
Status: install ok installed
Version: 2.35.30.0-2
"""


def machine(root: Path, product: str = "trn2.48xlarge", devices: int = 16) -> Path:
    """Make the files of a Neuron machine below a folder."""
    files = {
        **{f"dev/neuron{index}": "" for index in range(devices)},
        "sys/devices/virtual/dmi/id/product_name": f"{product}\n",
        "sys/module/neuron/version": "2.31.7.0\n",
        "var/lib/dpkg/status": DPKG,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Result]]:
    """Look at a made-up machine: its files are below a folder, its variables are the only ones."""
    monkeypatch.setattr(neuron_machine, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in (neuron_machine.VISIBLE, neuron_machine.COUNT, *neuron_machine.LNC_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    def look(degree: int = 1, **changes: Any) -> dict[str, Result]:
        usual = {
            "backend": NEURON,
            "port": {"_target_": "layerparity.ports.known.hf.HfPort"},
            "tp_degree": degree,
            "kind": RunKind.auto,
            "device_map": SimpleNamespace(strategy="auto"),
            "tracking": TrackingConfig(),
        }
        config: Any = SimpleNamespace(**{**usual, **changes})
        return {each.check: each for check in neuron_stack.CHECKS for each in check.look(config)}

    return look


def program(folder: Path, name: str, says: str, status: int = 0) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    file = folder / "bin" / name
    file.write_text(f"#!{sys.executable}\nprint({says!r})\nraise SystemExit({status})\n")
    file.chmod(0o755)


def test_a_trn2_has_64_cores_of_24_gib(tmp_path: Path, lines: Any) -> None:
    machine(tmp_path)
    program(tmp_path, "neuronx-cc", "NeuronX Compiler version 2.28.7631.0+ab12\n\nPython version")
    found = lines(64)
    assert {each.state for each in found.values()} == {State.OK}
    assert found["neuron cores"].found == (
        "trn2.48xlarge: 16 devices, LNC 2 (usual there): 64 logical cores of 24 GiB; "
        "a process takes all"
    )
    assert "NEURON_RT_VISIBLE_CORES=0-3" in found["neuron cores"].cure
    assert found["neuron driver"].found == "2.31.7.0"
    assert found["neuron runtime"].found == "2.35.30.0-2"
    assert found["neuron compiler"].found == "neuronx-cc 2.28.7631.0+ab12, of SDK 2.33"
    assert instance_here(tmp_path) == instance_of("trn2.48xlarge")


@pytest.mark.parametrize(
    ("variables", "degree", "state", "says"),
    [
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 128, State.OK, "LNC 1 (NEURON_LOGICAL_NC_CONFIG): 128 logical cores of 12 GiB"),  # noqa: E501
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, 1, State.OK, "LNC 1 (NEURON_RT_VIRTUAL_CORE_SIZE)"),
        ({"NEURON_RT_VISIBLE_CORES": "0-3,8"}, 5, State.OK, "a process takes 5 (NEURON_RT_VISIBLE_CORES=0-3,8)"),  # noqa: E501
        ({"NEURON_RT_NUM_CORES": "8"}, 8, State.OK, "a process takes 8 (NEURON_RT_NUM_CORES=8)"),
        ({"NEURON_RT_NUM_CORES": "0"}, 64, State.OK, "a process takes all"),
        ({"NEURON_RT_NUM_CORES": "8", "NEURON_RT_VISIBLE_CORES": "5"}, 1, State.OK, "a process takes 1 ("),  # noqa: E501
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, 8, State.PROBLEM, "tp_degree=8 wants as many"),
        ({}, 65, State.PROBLEM, "a process takes all, and tp_degree=65 wants as many"),
        ({"NEURON_RT_VISIBLE_CORES": "60-67"}, 1, State.PROBLEM, "there is no core 64"),
        ({"NEURON_RT_NUM_CORES": "65"}, 1, State.PROBLEM, "there is no core 64"),
    ],
)  # fmt: skip
def test_cores_by_variables(
    tmp_path: Path,
    lines: Any,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    degree: int,
    state: State,
    says: str,
) -> None:
    machine(tmp_path)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    found = lines(degree)["neuron cores"]
    assert (found.state, says in found.found) == (state, True), found
    # Another backend's tp_degree is not about these cores.
    gpu = SimpleNamespace(name="gpu", compile=False)
    beyond = "there is no core" in says
    assert (lines(degree, backend=gpu)["neuron cores"].state is State.PROBLEM) == beyond


@pytest.mark.parametrize(
    ("variables", "product", "says"),
    [
        ({"NEURON_LOGICAL_NC_CONFIG": "3"}, "trn2.48xlarge", "NEURON_LOGICAL_NC_CONFIG=3 is no LNC"),  # noqa: E501
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, "trn2.48xlarge", "contradict each other"),  # noqa: E501
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, "trn1.32xlarge", "trn1.32xlarge has no LNC 2"),
        ({"NEURON_RT_VISIBLE_CORES": "3-0"}, "trn2.48xlarge", "names no cores"),
        ({"NEURON_RT_VISIBLE_CORES": "all"}, "trn2.48xlarge", "write NEURON_RT_VISIBLE_CORES=0-3"),
        ({"NEURON_RT_NUM_CORES": "-1"}, "trn2.48xlarge", "is no number of cores"),
    ],
)  # fmt: skip
def test_variables_that_make_no_sense(
    tmp_path: Path, variables: dict[str, str], product: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        read_machine(machine(tmp_path, product), variables)


def test_a_container_that_sees_part_of_the_machine(tmp_path: Path, lines: Any) -> None:
    machine(tmp_path, "trn1.32xlarge", devices=4)
    found = lines(8)
    assert "LNC 1 (usual there): 8 logical cores of 16 GiB" in found["neuron cores"].found
    shown = found["neuron cores shown"]
    assert (shown.state, shown.found) == (State.WARNING, "4 of the 16 chips of a trn1.32xlarge")


def test_an_instance_that_nobody_knows(tmp_path: Path, lines: Any) -> None:
    machine(tmp_path, "trn9.huge", devices=2)
    found = lines()["neuron cores"]
    assert (found.state, found.found) == (State.WARNING, "trn9.huge: 2 devices, of unknown LNC")


def test_what_is_not_installed(tmp_path: Path, lines: Any) -> None:
    machine(tmp_path)
    (tmp_path / "var/lib/dpkg/status").unlink()
    (tmp_path / "sys/module/neuron/version").unlink()
    found = lines()
    assert found["neuron driver"].state is State.WARNING
    assert found["neuron runtime"].state is State.PROBLEM
    assert found["neuron compiler"].state is State.PROBLEM
    # Without dpkg the library's file says its version, and modinfo the driver's.
    (tmp_path / "opt/aws/neuron/lib").mkdir(parents=True)
    for name in ("libnrt.so.1", "libnrt.so.2.35.30.0"):
        (tmp_path / "opt/aws/neuron/lib" / name).touch()
    program(tmp_path, "modinfo", "2.31.7.0")
    program(tmp_path, "neuronx-cc", "no compiler of yours", status=1)
    found = lines()
    assert found["neuron runtime"].found == "2.35.30.0"
    assert found["neuron driver"].found == "2.31.7.0"
    assert found["neuron compiler"].state is State.PROBLEM


def test_a_machine_without_neuron_has_no_such_lines(lines: Any) -> None:
    assert lines(64) == {}


# ---------------------------------------------------------------- defaults of the compiler


def test_versions_and_what_changed_between_them() -> None:
    assert changed_between("2.21.33363.0+a", "2.22.12471.0+b") == list(CHANGES)
    assert changed_between("2.28.1", "2.20.9") == list(CHANGES)
    assert changed_between("2.22.0", "2.28.0") == changed_between("2.9.0", "2.21.5") == []
    assert changed_between("2.22.0", "") == changed_between("nightly", "2.20.1") == []
    releases = {"2.20.9961.0": "2.25", "2.22.12471.0": "2.27", "2.28.7631.0+x": "2.33"}
    assert {each: sdk_of(each) for each in releases} == releases
    assert sdk_of("2.29.1") == sdk_of("2.19.8089.0") == sdk_of("nightly") == ""


@pytest.mark.parametrize(
    ("then", "now", "state", "says", "cure"),
    [
        ("2.21.33363.0", "2.24.5133.0", State.WARNING, "since SDK 2.27, --auto-cast is none, was matmul and mixed-precision accumulation is on, was off", "compile with --auto-cast=matmul --disable-mixed-precision-accumulation, as then"),  # noqa: E501
        ("2.24.5133.0", "2.21.33363.0", State.WARNING, "since SDK 2.27", "compile with --auto-cast=none --enable-mixed-precision-accumulation, as then"),  # noqa: E501
        ("2.24.5133.0", "2.28.7631.0", State.OK, "no default that changes numbers differs", ""),
        ("2.28.7631.0", "2.29.1.0", State.WARNING, "what changed after 2.28 is not known here", "release notes"),  # noqa: E501
        ("2.29.1.0", "2.29.1.0", State.OK, "no default that changes numbers differs", ""),
    ],
)  # fmt: skip
def test_defaults_since_the_newest_candidate(
    tmp_path: Path, lines: Any, then: str, now: str, state: State, says: str, cure: str
) -> None:
    from layerparity.tracking.opening import open_store

    kept = TrackingConfig(folder=str(tmp_path / "kept"))
    program(tmp_path, "neuronx-cc", f"NeuronX Compiler version {now}")
    assert "neuron defaults" not in lines(tracking=kept)
    assert not kept.root.exists(), "looking makes no store"
    store = open_store(kept)
    assert "neuron defaults" not in lines(tracking=kept)
    for name, kind, version in (("older", "candidate", "2.5.0"), ("cand", "candidate", then), ("gold", "golden", "2.5.0")):  # fmt: skip # noqa: E501
        with store.start(name, kind, {"version.neuronx-cc": version}, {}):
            pass
    found = lines(tracking=kept)["neuron defaults"]
    assert found.state is state, found
    assert f"cand was compiled by {then}, here is {now}: {says}" in found.found
    assert cure in found.cure
    # One that XLA:CPU ran was compiled by nobody.
    with store.start("stand-in", "candidate", {}, {}):
        pass
    assert "neuron defaults" not in lines(tracking=kept)


def test_a_run_records_the_compiler_but_no_placeholder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerparity.making.fingerprint import versions

    def install(module: str, package: str, version: str, body: str) -> None:
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(body)
        info = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")  # fmt: skip # noqa: E501

    before = versions()
    install("neuronxcc", "neuronx-cc", "2.28.7631.0", "")
    install("torch_neuronx", "torch-neuronx", "1.0", "raise RuntimeError('get it at AWS')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions() == before | {"neuronx-cc": "2.28.7631.0"}
    assert neuron_stack.compiler_version() == "2.28.7631.0"
