"""What a runtime of backend=neuron promises, held against the one that this environment has.

With torch_xla it is the XLA runtime on XLA:CPU, without it the native runtime on torch's CPU
device: neither is Neuron. `make test` runs this file for the first, `make test-native` for the
other.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from neuron_blocks import Watched, block, given, llama, minimax, rel_l2

from layerparity.backends.export import mapped
from layerparity.backends.neuron import distributed
from layerparity.backends.neuron.compiler_options import Compile
from layerparity.backends.neuron.runtime import Runtime
from layerparity.backends.neuron.stage_graph import Graphs, StageGraph
from layerparity.ground.errors import UserError
from layerparity.machine.neuron import RuntimeChoice, detect
from layerparity.model import static_experts

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
HERE = RuntimeChoice.xla_cpu if HAS_XLA else RuntimeChoice.native_cpu


def made() -> Runtime:
    """Return this environment's stand-in, not yet prepared."""
    if HAS_XLA:
        from layerparity.backends.neuron.xla import XlaRuntime

        return XlaRuntime(False, 1, False)
    from layerparity.backends.neuron.native import NativeRuntime

    return NativeRuntime(False)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    assert detect(HERE).score == 1, detect(HERE).reason
    static_experts.register()
    each = made()
    each.prepare()
    each.load()
    each.start()
    yield each
    each.restore()


def test_a_stand_in_says_so(runtime: Runtime) -> None:
    assert detect(HERE).runtime is HERE
    assert detect(HERE).device == runtime.device_label
    assert runtime.device_label.endswith(", not Neuron")
    assert not runtime.is_neuron
    assert runtime.send(torch.ones(1)).device.type == runtime.device_type


def test_what_it_sets_is_set_back() -> None:
    before = dict(os.environ)
    torch.set_float32_matmul_precision("high")
    try:
        each = made()
        each.prepare()
        each.restore()
        each.restore()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert dict(os.environ) == before


def test_the_fingerprint_is_known_before_it_starts(runtime: Runtime) -> None:
    fresh = made()
    fresh.prepare()
    assert fresh.numerics() == runtime.numerics()
    assert all(isinstance(value, str) for value in runtime.numerics().values())
    assert fresh.facts() == {}
    fresh.restore()
    facts = runtime.facts()
    assert facts["compiles"] == str(runtime.counters()["compiles"])
    assert all(isinstance(value, str) for value in facts.values())
    names = {runtime.compiled_by(mode) for mode in (Compile.lazy, Compile.export)}
    assert len(names) == 2


VALUES = {
    "numbers": torch.linspace(-3, 3, 24).reshape(2, 3, 4),
    "16 bit": torch.linspace(-3, 3, 7).to(torch.bfloat16),
    "ids": torch.arange(6).reshape(2, 3),
    "mask": torch.tensor([True, False]),
    "one": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "a view": torch.arange(12.0).reshape(3, 4).T,
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_sent_comes_back_as_it_was(runtime: Runtime, name: str) -> None:
    value = VALUES[name]
    sent = runtime.send(value)
    assert (sent.shape, sent.dtype) == (value.shape, value.dtype)
    runtime.sync()
    assert torch.equal(sent.cpu(), value)


def test_the_device_has_memory_of_its_own(runtime: Runtime) -> None:
    value = torch.ones(3)
    sent = runtime.send(value)
    sent += 1
    runtime.sync()
    assert value.tolist() == [1, 1, 1]
    assert sent.cpu().tolist() == [2, 2, 2]


def test_a_module_moves_in_place_with_its_buffers(runtime: Runtime) -> None:
    module = block(minimax("static"), 0)
    names = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    runtime.move(module, {})
    moved = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert set(moved) == names
    assert {each.device.type for each in moved.values()} == {runtime.device_type}


def test_a_block_computes_what_the_host_does(runtime: Runtime) -> None:
    for config, own in ((llama(), llama()), (minimax("static"), minimax())):
        hidden, arguments = given(config)
        golden = block(own, 0)(hidden, **arguments)
        module = block(config, 0)
        runtime.move(module, {})
        output = module(runtime.send(hidden), **mapped(arguments, runtime.send))
        runtime.sync()
        assert output.device.type == runtime.device_type
        assert rel_l2(output.cpu(), golden) < 5e-6


def compiled(runtime: Runtime, graphs: Graphs, index: int, config: Any) -> dict[str, Any]:
    hidden, arguments = given(config)
    module = Watched(block(config, index))
    runtime.move(module, {})
    output, seen = StageGraph(module, graphs)(runtime.send(hidden), mapped(arguments, runtime.send))
    runtime.sync()
    return {name: value.cpu() for name, value in {**seen, "out": output}.items()}


def test_blocks_of_a_shape_share_a_graph_that_hands_out_what_is_observed(
    runtime: Runtime,
) -> None:
    graphs = Graphs(runtime.graph_compiler(None))
    seen = [compiled(runtime, graphs, index, minimax("static")) for index in range(2)]
    assert len(graphs._ready) == 1
    for index, found in enumerate(seen):
        hidden, arguments = given(minimax())
        output, golden = Watched(block(minimax(), index))(hidden, arguments)
        assert set(found) == {"self_attn", "mlp", "out"}
        for name, value in {**golden, "out": output}.items():
            assert rel_l2(found[name], value) < 5e-6, (index, name)
    assert runtime.counters()["compiles"] >= 1


def test_what_is_counted_is_counted_since_the_start(runtime: Runtime) -> None:
    counted = runtime.counters()
    assert counted["compiles"] == 0
    assert set(counted) <= {"compiles", "aten_fallbacks", "aten_names"}
    compiled(runtime, Graphs(runtime.graph_compiler(None)), 0, llama())
    assert runtime.counters()["compiles"] == 1


def test_shapes_that_depend_on_data_are_refused_when_compiled(runtime: Runtime) -> None:
    graphs = Graphs(runtime.graph_compiler(None))
    with pytest.raises(UserError, match=r"depends on its data.*experts_implementation=static"):
        compiled(runtime, graphs, 0, minimax("eager"))


def test_the_distributed_environment_is_made_for_it_and_removed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    granted = distributed.initialise(runtime)
    assert (granted.rank, granted.world_size, granted.tp_degree) == (0, 1, 1)
    assert runtime.world_size() == 1
    distributed.check_collectives(runtime)
    assert dist.is_initialized() is (runtime.process_group is not None)
    distributed.teardown()
    assert not dist.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2, but .*without torchrun"):
        distributed.initialise(runtime)
