"""Which flavour of torch_neuronx is here, what it needs, and which runtime that makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from neuron_blocks import command

from layerparity.backends.known import neuron
from layerparity.ground.errors import UserError
from layerparity.machine import neuron as machines
from layerparity.machine import neuron_flavour, neuron_packages
from layerparity.machine.neuron import RuntimeChoice, detect, runtime_of
from layerparity.machine.neuron_flavour import Flavour, installed, misfit

XLA_SOURCE = "from .xla_impl.trace import trace\n"
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that shows a made-up machine: its package, torch, Python and devices."""

    def show(
        source: str | None,
        version: str = "",
        torch: str = "2.13.0",
        python: tuple[int, int] = (3, 12),
        devices: int = 2,
    ) -> None:
        if source is not None:
            package = tmp_path / "torch_neuronx"
            package.mkdir()
            (package / "__init__.py").write_text(source)
            # Whether the environment that runs this has it must not matter: nobody imports it.
            (tmp_path / "torch_xla").mkdir()
            (tmp_path / "torch_xla" / "__init__.py").touch()
            monkeypatch.syspath_prepend(tmp_path)
        for index in range(devices):
            (tmp_path / f"neuron{index}").touch()
        versions = {"torch-neuronx": version, "torch": torch}
        monkeypatch.setattr(neuron_flavour, "version_of", lambda dist: versions[dist])
        monkeypatch.setattr(neuron_flavour, "PYTHON", python)
        monkeypatch.setattr(machines, "DEVICE_FILES", tmp_path)
        monkeypatch.delenv("PJRT_DEVICE", raising=False)

    return show


@pytest.mark.parametrize(
    ("source", "version", "flavour"),
    [
        ("", "2.13.3.0", Flavour.NATIVE),
        ("", "2.14.3.0+abc", Flavour.NATIVE),
        ("", "2.9.0.2.13.1", Flavour.XLA),
        ("", "1.13.1", Flavour.XLA),
        # Nothing tells the version of what was put on the path by hand: its symbols do.
        (XLA_SOURCE, "", Flavour.XLA),
        ("def trace(): ...\n", "", Flavour.XLA),
        ("import torch\n", "", Flavour.NATIVE),
        ("raise ImportError('WRONG PACKAGE')\n", "2.13.3.0", None),
        (None, "", None),
    ],
)
def test_the_flavour_is_told_without_an_import(
    machine: Machine, source: str | None, version: str, flavour: Flavour | None
) -> None:
    machine(source, version)
    found = installed()
    assert (found and found.flavour) is flavour


@pytest.mark.parametrize(
    ("version", "torch", "python", "said"),
    [
        ("2.13.3.0", "2.13.0", (3, 11), r"needs Python 3\.12 to 3\.14, and this is Python 3\.11"),
        ("2.13.3.0", "2.13.0", (3, 15), r"this is Python 3\.15: make an environment with python3"),
        ("2.13.3.0", "2.9.1", (3, 12), r"made for torch 2\.13, and torch is 2\.9\.1: pip install"),
        ("2.14.3.0", "2.13.0", (3, 12), r"made for torch 2\.14, and torch is 2\.13\.0"),
        ("2.13.3.0", "2.14.0", (3, 12), r"made for torch 2\.13, and torch is 2\.14\.0"),
        ("2.9.0.2", "2.13.0", (3, 12), r"XLA flavour, made for torch 2\.9, and torch is 2\.13"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_in_a_line(
    machine: Machine, version: str, torch: str, python: tuple[int, int], said: str
) -> None:
    machine(XLA_SOURCE if version.startswith("2.9") else "", version, torch, python)
    choice = RuntimeChoice.xla if version.startswith("2.9") else RuntimeChoice.auto
    with pytest.raises(UserError, match=said) as refused:
        neuron.build(neuron.Settings(runtime=choice), command())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "torch"), [("2.13.3.0", "2.13.0"), ("2.14.3.0", "2.14.1"), ("2.9.0.2", "2.9.1")]
)
def test_an_environment_that_fits(machine: Machine, version: str, torch: str) -> None:
    machine("", version, torch)
    found = installed()
    assert found is not None
    assert misfit(found) is None


def test_auto_goes_by_the_package_that_is_here(machine: Machine) -> None:
    machine("", "2.13.3.0")
    assert runtime_of(RuntimeChoice.auto) is RuntimeChoice.native
    found = detect()
    assert (found.score, found.device, found.runtime) == (2, "Neuron", RuntimeChoice.native)
    assert found.found == "2 Neuron devices, torch_neuronx 2.13.3.0 is the native flavour"
    able = neuron.abilities(neuron.Settings())
    assert able.libraries == ("torch_neuronx",)
    assert able.eager
    assert not (able.settings_once or able.nxdi)
    refused = detect(RuntimeChoice.xla)
    assert (refused.score, refused.cure) == (0, "use backend.runtime=native, or auto.")


def test_nobody_gets_the_native_stand_in_who_did_not_ask(machine: Machine) -> None:
    machine("", "2.13.3.0", devices=0)
    found = detect()
    assert found.score == 0
    assert "There is no Neuron device" in found.found
    assert found.cure == "for the stand-in, use backend.runtime=native_cpu."
    assert detect(RuntimeChoice.native_cpu).score == 1


def test_native_wants_the_native_package(machine: Machine) -> None:
    machine(XLA_SOURCE, "2.9.0.2", "2.9.1")
    assert runtime_of(RuntimeChoice.auto) is RuntimeChoice.xla
    assert detect().score == 2
    found = detect(RuntimeChoice.native)
    assert (found.score, found.found) == (0, "torch_neuronx 2.9.0.2 is the XLA flavour")
    assert "install torch-neuronx 2.13 or newer from AWS's own index" in found.cure


def test_native_without_a_package(machine: Machine) -> None:
    machine("raise ImportError('WRONG PACKAGE')\n", "2.13.3.0")
    found = detect(RuntimeChoice.native)
    assert (found.score, found.found) == (0, "torch_neuronx is missing or PyPI's placeholder")


def test_without_torch_xla_a_newer_torch_has_another_stand_in(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(neuron_packages.sys.modules, "torch_xla", None)
    machine(None, torch="2.13.0", devices=0)
    found = detect()
    assert (found.score, found.found) == (0, "torch_xla is not installed")
    assert "backend.runtime=native_cpu; on Trainium, install torch-neuronx 2.13" in found.cure


def test_the_stand_in_is_for_the_torch_that_the_native_flavour_is_made_for(
    machine: Machine,
) -> None:
    machine(None, torch="2.9.1")
    with pytest.raises(UserError, match=r"needs torch 2\.13 or newer; this is 2\.9\.1: use an"):
        neuron.build(neuron.Settings(runtime=RuntimeChoice.native_cpu), command())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compile": neuron.Compile.trace}, "the native runtime keeps its own: use backend.comp"),
        ({"excess_precision": True}, "backend.excess_precision is for the XLA runtime: leave it"),
        ({"artefacts": "kept"}, "backend.artefacts is for the XLA runtime"),
        ({"reuse_compiled": neuron.ReuseCompiled.only}, "backend.reuse_compiled is for the XLA"),
        ({"auto_cast": neuron.AutoCast.all}, "backend.auto_cast is for the XLA runtime"),
        ({"compiler_args": "--verbose"}, "backend.compiler_args is for the XLA runtime"),
    ],
)
def test_keys_of_the_other_runtime_are_refused(
    machine: Machine, settings: dict[str, object], said: str
) -> None:
    machine("", "2.13.3.0")
    with pytest.raises(UserError, match=said):
        neuron.build(neuron.Settings(**settings), command())  # type: ignore[arg-type]


def test_ranks_are_for_the_models_of_transformers(machine: Machine) -> None:
    machine("", "2.13.3.0")
    with pytest.raises(UserError, match=r"tp_degree=2: only port=hf is split over ranks"):
        neuron.build(neuron.Settings(), command(tp_degree=2))
