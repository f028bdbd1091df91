"""The distributed environment: once, before any component, and never less than was asked.

neuronx_distributed is a test double with the signatures of its parallel_state module; the process
group is torch_xla's own.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from layerparity.backends.known import neuron
from layerparity.backends.neuron import distributed
from layerparity.ground.errors import UserError
from layerparity.machine import neuron_packages

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# As in neuronx_distributed/parallel_layers/parallel_state.py, with its silent lowering.
PARALLEL_STATE = """
    import torch

    _TP = None

    def initialize_model_parallel(
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        skip_collective_init: bool = False,
        lnc_size: int = 1,
        mesh_only: bool = False,
    ):
        global _TP
        assert torch.distributed.is_initialized()
        _TP = min(tensor_model_parallel_size, torch.distributed.get_world_size())

    def model_parallel_is_initialized() -> bool:
        return _TP is not None

    def get_tensor_model_parallel_size() -> int:
        assert _TP is not None, "intra_layer_model parallel group is not initialized"
        return _TP

    def destroy_model_parallel() -> None:
        global _TP
        _TP = None
"""

STATE_FILE = {"parallel_layers/parallel_state": PARALLEL_STATE}


@dataclass
class Machine:
    """The part of a runtime that the distributed environment asks."""

    tp_degree: int = 1
    is_neuron: bool = True
    process_group: str | None = "xla"
    why_alone: str = ""
    reach: int = 1

    def world_size(self) -> int:
        return self.reach


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    distributed.teardown()
    import torch.distributed as dist

    assert not dist.is_initialized()


@pytest.fixture
def xla_group() -> None:
    """Make the ``xla`` process group known, as the runtime's `load` does."""
    if neuron.affinity().score == 0:
        pytest.skip(neuron.affinity().reason)
    import torch_xla.distributed.xla_backend  # noqa: F401


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes a package importable; it is forgotten after the test."""
    names: list[str] = []

    def make(name: str, init: str, **files: str) -> None:
        for path, text in {"__init__": init, **files}.items():
            file = tmp_path / name / f"{path}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        names.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for loaded in list(sys.modules):
        if loaded.split(".")[0] in names:
            del sys.modules[loaded]


@pytest.fixture
def neuronx(install: Callable[..., None], xla_group: None) -> Any:
    install("neuronx_distributed", "__version__ = '0.15'", **STATE_FILE)
    return lambda: sys.modules["neuronx_distributed.parallel_layers.parallel_state"]


def test_a_single_process_gets_defaults_a_group_and_a_degree(neuronx: Any) -> None:
    import torch.distributed as dist

    granted = distributed.initialise(Machine())
    assert (granted.rank, granted.world_size, granted.tp_degree) == (0, 1, 1)
    assert dist.get_backend() == "xla"
    assert neuronx().get_tensor_model_parallel_size() == 1
    assert os.environ["WORLD_SIZE"] == "1"
    distributed.teardown()
    assert not dist.is_initialized()
    assert not neuronx().model_parallel_is_initialized()
    assert not set(VARIABLES) & set(os.environ)
    distributed.teardown()


def test_it_is_idempotent_and_ends_with_the_last_holder(neuronx: Any) -> None:
    import torch.distributed as dist

    assert distributed.initialise(Machine()) is distributed.initialise(Machine())
    with pytest.raises(UserError, match=r"tp_degree=1, and tp_degree=2 was asked"):
        distributed.initialise(Machine(tp_degree=2))
    distributed.teardown()
    assert dist.is_initialized()
    distributed.teardown()
    assert not dist.is_initialized()
    assert distributed.initialise(Machine()).tp_degree == 1


def test_a_degree_lowered_silently_is_refused_and_undone(neuronx: Any) -> None:
    with pytest.raises(UserError, match=r"tp_degree=8 was asked and 1 granted.*nproc_per_node=8"):
        distributed.initialise(Machine(tp_degree=8))
    assert not neuronx().model_parallel_is_initialized()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody else made a group of two ranks; torch's fake store stands in for the other one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, value in zip(VARIABLES, ("1", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    distributed.teardown()
    assert dist.is_initialized(), "a group that somebody else made is not ours to destroy"
    dist.destroy_process_group()


def test_a_launchers_ranks_are_used(neuronx: Any, two_ranks: None) -> None:
    granted = distributed.initialise(Machine(tp_degree=2, reach=2))
    assert (granted.rank, granted.world_size, granted.tp_degree) == (1, 2, 2)
    distributed.check_collectives(Machine(tp_degree=2, reach=2))
    distributed.teardown()
    assert os.environ["RANK"] == "1"


def test_collectives_that_reach_nobody_are_refused(neuronx: Any, two_ranks: None) -> None:
    distributed.initialise(Machine(tp_degree=2))
    with pytest.raises(UserError, match=r"reach 1 of 2 ranks.*torchrun"):
        distributed.check_collectives(Machine(tp_degree=2, reach=1))


def test_a_group_of_another_size_is_refused(
    neuronx: Any, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="already initialised with 2 ranks, not 4"):
        distributed.initialise(Machine(tp_degree=4))


def test_a_state_that_somebody_else_made_is_kept(neuronx: Any, two_ranks: None) -> None:
    neuron_packages.parallel_state().initialise(2)  # type: ignore[union-attr]
    assert distributed.initialise(Machine(tp_degree=2, reach=2)).tp_degree == 2
    distributed.teardown()
    assert neuronx().get_tensor_model_parallel_size() == 2
    with pytest.raises(UserError, match="tp_degree=1 was asked and 2 granted"):
        distributed.initialise(Machine(tp_degree=1, reach=2))


def test_torchrun_on_xla_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from layerparity.backends.neuron.xla import XlaRuntime

    alone = XlaRuntime(False, 1, False).why_alone
    said = r"WORLD_SIZE=2, but .*collectives do nothing.*without torchrun, with tp_degree=2"
    with pytest.raises(UserError, match=said):
        distributed.initialise(Machine(is_neuron=False, why_alone=alone))
    assert XlaRuntime(True, 2, False).why_alone == ""


def test_spmd_is_one_process_without_a_group() -> None:
    import torch.distributed as dist

    granted = distributed.initialise(Machine(tp_degree=4, is_neuron=False, process_group=None))
    assert (granted.world_size, granted.tp_degree) == (1, 4)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "whole numbers"),
        ({"WORLD_SIZE": "2"}, "without RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "not below"),
    ],
)
def test_nonsense_from_a_launcher_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        distributed.ranks(given)
    assert distributed.ranks({}) == (0, 1)


def test_ranks_that_cannot_meet_are_named(neuronx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def fails(*_: Any, **__: Any) -> None:
        raise dist.DistNetworkError("The server socket has failed to listen\nmore")

    monkeypatch.setattr(dist, "init_process_group", fails)
    with pytest.raises(UserError, match=r"Rank 0 of 1 .*127\.0\.0\.1:12355.*listen\): check"):
        distributed.initialise(Machine())


def test_placeholders_are_absent(install: Callable[..., None], xla_group: None) -> None:
    raises = "raise ImportError('WRONG PACKAGE. Please install the package from elsewhere')"
    install("torch_neuronx", raises)
    install("neuronx_distributed", f'"""Nothing here."""\n{raises}')
    assert not neuron_packages.looks_real("torch_neuronx")
    assert neuron_packages.torch_neuronx() is None
    assert neuron_packages.parallel_state() is None
    assert distributed.initialise(Machine()).tp_degree == 1
    distributed.teardown()
    with pytest.raises(UserError, match="install neuronx-distributed from AWS"):
        distributed.initialise(Machine(tp_degree=2))


def test_the_two_flavours_are_told_apart(install: Callable[..., None]) -> None:
    install("torch_neuronx", "__version__ = '2.9.0.2'\ndef trace(): ...")
    assert neuron_packages.torch_neuronx() is not None
    assert neuron_packages.versions()["torch_neuronx"] == "2.9.0.2"
    del sys.modules["torch_neuronx"].trace
    with pytest.raises(UserError, match=r"torch_neuronx 2\.9\.0\.2 is the native flavour"):
        neuron_packages.torch_neuronx()


def test_a_package_that_does_not_import_is_not_called_absent(install: Callable[..., None]) -> None:
    install("neuronx_distributed", "import something_it_needs")
    with pytest.raises(UserError, match=r"does not import .*something_it_needs"):
        neuron_packages.parallel_state()


def test_transformers_5_does_not_keep_neuronx_distributed_out(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "transformers.utils.fx", raising=False)
    needs = "from transformers.utils.fx import HFTracer"
    install("neuronx_distributed", needs, **STATE_FILE)
    assert neuron_packages.parallel_state() is not None
    assert neuron_packages.parallel_state() is not None
