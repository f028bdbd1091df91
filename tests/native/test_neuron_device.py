"""The code path of Neuron itself, on a device of torch's that is called ``neuron`` and is none.

It is made in Python (neuron_device.py), and refuses what mixes it with the CPU, so that a tensor
that was left behind is seen. AWS's package is a stand-in, and so are the device files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from neuron_blocks import block, given, llama, rel_l2

from layerparity.backends.base import RankDevices
from layerparity.backends.export import mapped
from layerparity.backends.known import neuron
from layerparity.backends.neuron.native import NativeRuntime
from layerparity.ground.errors import UserError
from layerparity.machine import neuron as machines
from layerparity.machine import neuron_flavour, neuron_packages
from layerparity.model import static_experts
from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
HERE = Path(__file__).parent


@pytest.fixture
def trainium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show two Neuron devices, AWS's native package and the Python that it wants."""
    for name in ("neuron0", "neuron1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machines, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(neuron_flavour, "PYTHON", (3, 12))
    for folder in (HERE, HERE / "aws"):
        monkeypatch.syspath_prepend(folder)
    versions = {"torch-neuronx": "2.13.3.0", "torch": torch.__version__}
    monkeypatch.setattr(neuron_flavour, "version_of", lambda dist: versions[dist])


@pytest.fixture
def runtime(trainium: None) -> Iterator[NativeRuntime]:
    static_experts.register()
    each = NativeRuntime(True)
    each.prepare()
    each.load()
    each.start()
    yield each
    each.restore()


def test_the_device_refuses_what_mixes_it_with_the_cpu(runtime: NativeRuntime) -> None:
    """What shows a tensor that was left behind has to be seen to fail itself."""
    sent = runtime.send(torch.ones(3))
    assert sent.device.type == "neuron"
    with pytest.raises(RuntimeError, match="neuron"):
        sent + torch.ones(3)


def test_a_block_computes_on_it_as_on_the_host(runtime: NativeRuntime) -> None:
    config = llama()
    hidden, arguments = given(config)
    golden = block(config, 0)(hidden, **arguments)
    module = block(config, 0)
    runtime.move(module, {})
    on = {e.device.type for e in (*module.parameters(), *module.buffers())}
    assert on == {"neuron"}
    with torch.no_grad():
        output = module(runtime.send(hidden), **mapped(arguments, runtime.send))
    assert output.device.type == "neuron"
    assert rel_l2(output.cpu(), golden) < 5e-6


def test_it_waits_for_the_device_once(runtime: NativeRuntime) -> None:
    before = torch.neuron.synchronised  # type: ignore[attr-defined]
    runtime.sync()
    assert torch.neuron.synchronised == before + 1  # type: ignore[attr-defined]
    assert runtime.facts()["torch_neuronx"] == "2.13.3.0"
    assert (runtime.device_label, runtime.device_type) == ("Neuron", "neuron")


def test_what_ran_on_the_cpu_is_counted_where_the_package_tells_it(
    runtime: NativeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS's package names each operation, once for each time."""
    assert runtime.counters().keys() == {"compiles"}
    assert runtime.facts()["aten_fallbacks"] == "not told"
    fell = ["aten::acos"]
    package = neuron_packages.sys.modules["torch_neuronx"]
    monkeypatch.setattr(package, "get_fallback_ops", lambda: list(fell), raising=False)
    runtime.start()
    assert runtime.facts()["aten_fallbacks"] == "none"
    fell += ["aten::acos", "aten::histc", "aten::acos"]
    assert runtime.counters()["aten_fallbacks"] == 3
    assert runtime.facts()["aten_fallbacks"] == "aten::acos,aten::histc"


def test_lnc_is_the_runtimes_variable_while_it_runs(
    trainium: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    each = NativeRuntime(True, lnc=1)
    assert each.numerics()["NEURON_LOGICAL_NC_CONFIG"] == "1"
    each.prepare()
    assert machines.os.environ["NEURON_LOGICAL_NC_CONFIG"] == "1"
    each.restore()
    assert "NEURON_LOGICAL_NC_CONFIG" not in machines.os.environ


def test_a_package_that_brings_no_device_is_refused(
    trainium: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    with pytest.raises(UserError, match="torch knows no device 'neuron' afterwards: install"):
        NativeRuntime(True).load()
    monkeypatch.setattr(neuron_packages.sys.modules["torch_neuronx"], "trace", print, raising=False)
    with pytest.raises(UserError, match=r"2\.13\.3\.0 is the XLA flavour: use backend.runtime=xla"):
        NativeRuntime(True).load()


def test_ranks_are_joined_by_neurons_own_collectives(trainium: None) -> None:
    class Config:
        backend: Any = neuron.Settings()

    able = neuron.abilities(Config.backend)
    assert able.ranks is not None
    assert able.ranks(Config()) == RankDevices("neuron", "neuron", "Neuron", launched=True)  # type: ignore


def test_a_candidate_on_the_device_passes(trainium: None, cli: Cli, store: Path) -> None:
    """backend.runtime=auto finds the native flavour, and every stage computes on its device."""
    scope = (f"tracking.folder={store}", "scope=single", "layer=0", "capture=components")
    golden = cli(*scope, "backend=gpu", "device_map=cpu", "inputs=prompt", "name=golden")
    assert golden.exit == 0, golden.err
    ended = cli(*scope, "backend=neuron", "name=native")
    assert ended.exit == 0, ended.err
    cli(f"tracking.folder={store}", "job=compare", "candidate=native", "name=judged")
    tracked = open_store(TrackingConfig(folder=str(store)))
    run = tracked.find("native")[0]
    assert run.read_manifest().device == "Neuron"
    assert run.tags["fact.native_device"] == "neuron"
    verdict = Verdict.read(next(tracked.find("judged")[0].folder.rglob("verdict.json")))
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert "torch_xla" not in sys.modules
