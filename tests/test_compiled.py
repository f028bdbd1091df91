"""Stages as compiled graphs that are kept: on XLA:CPU for real, on Neuron by a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from neuron_blocks import Watched, block, command, given, llama, minimax, rel_l2
from safetensors import safe_open
from test_artefacts import Echo
from torch import nn

from layerparity.backends.export import exported
from layerparity.backends.graph import graph_digest, unread_weights
from layerparity.backends.known import neuron
from layerparity.backends.neuron import stablehlo, xla
from layerparity.backends.neuron.artefacts import ArtefactFolder
from layerparity.backends.neuron.compiler_options import (
    AutoCast,
    Compile,
    CompilerOptions,
    ReuseCompiled,
)
from layerparity.backends.neuron.neff import NeffCompiler
from layerparity.backends.neuron.stage_graph import Graphs, StageGraph
from layerparity.ground.errors import UserError
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.known.bias_frozen_in_graph import FAULT

pytestmark = pytest.mark.skipif(
    neuron.affinity().score == 0, reason=f"neuron: {neuron.affinity().reason}"
)


@pytest.fixture
def tracing(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open backends that keep their graphs in one folder, one after the other."""
    opened = []

    def make(**keys: Any) -> Any:
        settings = neuron.Settings(compile=Compile.trace, artefacts=str(tmp_path / "kept"), **keys)
        backend = neuron.build(settings, command())
        backend.open()
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.close()


def counted(backend: Any) -> tuple[int, int]:
    """Return how many graphs were compiled, and how many loaded."""
    facts = backend.facts()
    return int(facts["artefacts_compiled"]), int(facts["artefacts_loaded"])


def observe(backend: Any, index: int) -> dict[str, torch.Tensor]:
    """Run a block of MiniMax-M2 through the backend, and fetch its output and sites."""
    config = minimax("static")
    hidden, arguments = given(config)
    module = Watched(block(config, index))
    backend.put(f"layers.{index}", module)
    sent = (backend.send("layers.0", hidden), backend.send("layers.0", arguments))
    output, seen = backend.compile(module, sent)(*sent)
    fetched: dict[str, torch.Tensor] = backend.fetch({**seen, "out": output})
    return fetched


def test_blocks_of_a_shape_share_a_graph_that_holds_no_weight(
    tracing: Callable[..., Any], tmp_path: Path
) -> None:
    first = tracing()
    made = [observe(first, index) for index in range(2)]
    assert counted(first) == (1, 0)
    hidden, arguments = given(minimax())
    for index, sites in enumerate(made):
        with torch.no_grad():
            golden, _ = Watched(block(minimax(), index))(hidden, arguments)
        assert rel_l2(sites["out"] - hidden, golden - hidden) < 5e-6
    (kept,) = (tmp_path / "kept").glob("*.safetensors")
    weights = sum(each.numel() for each in block(minimax(), 0).parameters())
    assert kept.stat().st_size < weights
    with safe_open(kept, framework="pt") as file:
        assert set(file.keys()) == {"header", "payload"}
        header = bytes(file.get_tensor("header").tolist()).decode()
    # Every weight is an input, the router's bias among them.
    for name in (name for name, _ in block(minimax(), 0).state_dict().items()):
        assert f'"inner.{name}"' in header
    again = tracing(reuse_compiled=ReuseCompiled.only)
    loaded = [observe(again, index) for index in range(2)]
    assert counted(again) == (0, 1)
    for ours, theirs in zip(made, loaded, strict=True):
        assert all(torch.equal(ours[site], theirs[site]) for site in ours)
    afresh = tracing(reuse_compiled=ReuseCompiled.never)
    observe(afresh, 0)
    assert counted(afresh) == (1, 0)


class Scaled(nn.Module):
    """A weight and a factor that is written into the graph."""

    def __init__(self, factor: float = 2.0, sites: tuple[str, ...] = ("a",)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.factor, self.sites = factor, sites

    def forward(self, x: Any) -> Any:
        product = x * self.weight * self.factor
        return product, dict.fromkeys(self.sites, product + 1)


def digest(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> str:
    module = module.to(dtype).requires_grad_(False)
    return graph_digest(exported(module, (torch.ones(*shape, dtype=dtype),), "", ""))


def test_a_graph_is_known_by_what_it_computes() -> None:
    usual, other = digest(Scaled(), 2, 3), Scaled()
    nn.init.zeros_(other.weight)
    assert digest(other, 2, 3) == usual
    changed = [
        digest(Scaled(2.5), 2, 3),
        digest(Scaled(sites=("b",)), 2, 3),
        digest(Scaled(sites=("a", "b")), 2, 3),
        digest(Scaled(), 4, 3),
        digest(Scaled(), 2, 3, dtype=torch.bfloat16),
    ]
    assert len({usual, *changed}) == 6


class Frozen(nn.Module):
    """A weight that its graph does not read: it has a constant of its own."""

    def __init__(self, kind: str, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        constant = torch.full((3,), value)
        if kind == "buffer":
            self.register_buffer("baked", constant, persistent=False)
        else:
            self.baked = constant

    def forward(self, x: Any) -> Any:
        return x + self.baked.clone()


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_frozen_weight_is_found_before_anything_is_compiled(kind: str, tmp_path: Path) -> None:
    folder = ArtefactFolder(tmp_path, ReuseCompiled.auto, print)
    graphs = Graphs(Echo(), folder)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"does not read weight: .*baked, frozen with other"):
        StageGraph(Frozen(kind, 0.0), graphs)(torch.ones(3))
    assert folder.compiled == 0
    program = exported(Frozen(kind, 1.0), (torch.ones(3),), "", "")
    (found,) = unread_weights(program)
    assert found.equal


def test_the_known_bug_of_a_bias_frozen_as_zeros_is_found(tracing: Callable[..., Any]) -> None:
    config = minimax("static")
    whole = block(config, 0)
    surgery = Surgery(0, config)
    FAULT.plant(whole, surgery)
    backend = tracing()
    backend.put("layers.0", whole)
    hidden, arguments = (backend.send("layers.0", each) for each in given(config))
    module = Watched(whole)
    with pytest.raises(UserError, match=r"does not read inner\.mlp\.e_score_correction_bias"):
        backend.compile(module, (hidden, arguments))(hidden, arguments)
    assert counted(backend) == (0, 0)


class Step(nn.Module):
    """A block as the port calls it: (given, arguments) to (output, sites)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Any, arguments: dict[str, Any]) -> Any:
        return self.inner(hidden, **arguments), {"in": hidden.clone()}


def decoded(stage: Callable[..., Any], send: Callable[[Any], Any]) -> torch.Tensor:
    """Return what a block gives of 4 tokens and 2 more, one by one, with a static cache of 8."""
    from transformers import StaticCache

    config = llama(head_dim=32)
    cache = StaticCache(config=config, max_cache_len=8)
    hidden, named = given(config)
    outputs = []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        rows = torch.arange(first, last)
        hides = torch.arange(8).unsqueeze(0) > rows.unsqueeze(1)
        mask = torch.zeros(2, 1, last - first, 8).masked_fill(hides, torch.finfo().min)
        tables = tuple(each[:, first:last] for each in named["position_embeddings"])
        arguments = send({"attention_mask": mask, "position_embeddings": tables})
        with torch.no_grad():
            sent = send(hidden[:, first:last].contiguous())
            output, _ = stage(sent, {**arguments, "past_key_values": cache})
        outputs.append(output.cpu())
    # A port reads what was put in: a lazy gather from it.
    kept = cache.layers[1].keys.index_select(2, send(torch.tensor([5])))
    return torch.cat([*outputs, kept.cpu().transpose(1, 2).flatten(2)[..., :64]], -2)


def test_a_cache_goes_through_compiled_graphs(tracing: Callable[..., Any]) -> None:
    """One graph for the prompt and one for every step after it."""
    golden = decoded(Step(block(llama(head_dim=32), 1)), lambda value: value)
    backend = tracing()
    module = Step(block(llama(head_dim=32), 1))
    backend.put("layers.1", module)
    graph = backend.compile(module, ())
    got = decoded(graph, lambda value: backend.send("layers.1", value))
    assert rel_l2(got, golden) < 1e-6
    assert counted(backend) == (2, 0)


def test_a_cache_that_no_graph_can_take_is_refused() -> None:
    from transformers import StaticCache

    cache = StaticCache(config=llama(sliding_window=4, layer_types=None), max_cache_len=8)
    graphs = Graphs(Echo())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"compile=export takes the static cache of one block"):
        StageGraph(Step(nn.Linear(2, 2)), graphs)(torch.ones(2), {"past_key_values": cache})


def test_on_neuron_options_reach_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(xla, "_given", {})
    monkeypatch.setenv("NEURON_CC_FLAGS", "--mine")
    runtime = xla.XlaRuntime(True, 1, False, CompilerOptions(opt_level=2, lnc=2))
    numerics = runtime.numerics()
    assert numerics["NEURON_CC_FLAGS"] == "--mine --optlevel=2 --lnc=2"
    assert numerics["NEURON_LOGICAL_NC_CONFIG"] == numerics["compiler.lnc"] == "2"
    assert isinstance(runtime.graph_compiler(tmp_path), NeffCompiler)
    assert isinstance(runtime.graph_compiler(None), stablehlo.StableHloCompiler)


def test_options_enter_the_fingerprint_everywhere_and_say_where_they_do_nothing() -> None:
    plain = neuron.build(neuron.Settings(), command())
    asked = neuron.build(neuron.Settings(opt_level=2, auto_cast=AutoCast.all), command())
    told = set(asked.numerics().items()) - set(plain.numerics().items())
    assert told == {("compiler.opt_level", "2"), ("compiler.auto_cast", "all")}
    assert asked.warnings[0].startswith("backend.auto_cast=all is for Neuron: on XLA:CPU it")
    assert plain.warnings == []


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A torch_neuronx whose ``trace`` has the documented signature and is torch's own tracer."""
    calls: list[dict[str, Any]] = []

    def trace(
        func: Any,
        example_inputs: Any,
        *_: Any,
        input_output_aliases: Any = None,
        compiler_workdir: str | None = None,
        compiler_args: Any = None,
        partitioner_config: Any = None,
        inline_weights_to_neff: bool = True,
        cpu_backend: bool = False,
    ) -> Any:
        assert all(each.device.type == "cpu" for each in example_inputs)
        if compiler_args == ["--fail"]:
            raise RuntimeError("neuronx-cc ended with 70\nmore")
        calls.append({"inputs": example_inputs, "args": compiler_args, "in": compiler_workdir})
        return torch.jit.trace(func, example_inputs)

    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(trace=trace))  # type: ignore[arg-type]
    return calls


def test_on_neuron_a_stage_is_traced_with_its_weights_as_inputs(
    traced: list[dict[str, Any]], tmp_path: Path
) -> None:
    """By a stand-in for ``torch_neuronx.trace``: what hardware does is not shown here."""
    asked = CompilerOptions(opt_level=1)
    config = minimax("static")
    hidden, arguments = given(config)
    folder = ArtefactFolder(tmp_path / "kept", ReuseCompiled.auto, print)
    for index in range(2):
        # Each time as another process would: nothing but the folder is shared.
        graphs = Graphs(NeffCompiler(asked, {}, tmp_path / "work"), folder)
        module = Watched(block(config, index))
        output, seen = StageGraph(module, graphs)(hidden, arguments)
        with torch.no_grad():
            golden, sites = module(hidden, arguments)
        assert rel_l2(output - hidden, golden - hidden) < 1e-6
        assert set(seen) == set(sites)
    assert (folder.compiled, folder.loaded) == (1, 1)
    (call,) = traced
    assert call["args"] == ["--optlevel=1"]
    assert Path(call["in"]).parent == tmp_path / "work"
    weights = {tuple(each.shape) for each in block(config, 0).parameters()}
    assert weights <= {tuple(each.shape) for each in call["inputs"]}


def test_what_neurons_compiler_refuses_is_one_line(
    traced: list[dict[str, Any]], tmp_path: Path
) -> None:
    compiler = NeffCompiler(CompilerOptions("--fail"), {}, tmp_path)
    with pytest.raises(UserError, match=r"could not compile a stage \(neuronx-cc ended with 70\)"):
        StageGraph(Scaled().requires_grad_(False), Graphs(compiler))(torch.ones(2, 3))


def test_other_packages_are_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = stablehlo.StableHloCompiler({"XLA_FLAGS": "--a"})
    assert set(compiler.versions) == {"torch", "torch_xla", "transformers"}
    assert compiler.options == {"compiler": "XLA", "XLA_FLAGS": "--a"}
    assert stablehlo.versions_of(("no-such-package",)) == {"no-such-package": "missing"}


SHARDED = """
import json, sys
import torch
from neuron_blocks import Watched, block, command, given, llama, minimax, rel_l2
from test_compiled import Step, counted, decoded
from layerparity.ground.errors import UserError
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.known.bias_frozen_in_graph import FAULT
from layerparity.backends.known import neuron
from layerparity.backends.neuron.compiler_options import Compile
from transformers import AutoModelForCausalLM

settings = neuron.Settings(compile=Compile.trace, artefacts=sys.argv[1])
backend = neuron.build(settings, command(tp_degree=2))
backend.open()
import torch_xla.distributed.spmd as xs
stages = {f"layers.{i}": f"model.layers.{i}" for i in range(2)}


def place(config):
    with torch.device("meta"):
        backend.place(AutoModelForCausalLM.from_config(config), stages)


told = {"errors": {}, "sites": []}
config = minimax("static")
place(config)
for dtype in (torch.float32, torch.bfloat16):
    hidden, arguments = given(config, dtype)
    for index in range(2):
        module = Watched(block(config, index, dtype))
        with torch.no_grad():
            golden = module(hidden, arguments)[0] - hidden
        backend.put(f"layers.{index}", module.inner)
        sent = backend.send("layers.0", hidden), backend.send("layers.0", arguments)
        if index:
            # What comes from another stage may be split itself: it is the same graph.
            xs.mark_sharding(sent[0], backend.runtime._mesh, (None, None, "within"))
        output, seen = backend.compile(module, sent)(*sent)
        fetched = backend.fetch({**seen, "out": output})
        told["errors"][f"{dtype} {index}"] = rel_l2(fetched["out"] - hidden, golden)
        told["sites"].append(sorted(fetched))
frozen = block(config, 0)
FAULT.plant(frozen, Surgery(0, config))
backend.put("layers.0", frozen)
try:
    sent = backend.send("layers.0", given(config)[0]), backend.send("layers.0", given(config)[1])
    backend.compile(Watched(frozen), sent)(*sent)
except UserError as error:
    told["frozen"] = str(error)
config = llama(head_dim=32)
place(config)
step = Step(block(config, 1))
usual = decoded(step, lambda value: value)
backend.put("layers.1", step.inner)
got = decoded(backend.compile(step, ()), lambda value: backend.send("layers.1", value))
told["errors"]["decoded torch.float32"] = rel_l2(got, usual)
told |= {"counted": counted(backend), "facts": backend.facts(), "said": backend.warnings}
backend.close()
print(json.dumps(told))
"""


def test_sharded_graphs_are_kept_and_loaded_in_another_process(tmp_path: Path) -> None:
    """Two devices of XLA:CPU: two types of number, a prompt and its steps; then all of it again."""
    # torch_xla wrote some variables of this process; the others start without them.
    ours = ("PJRT_", "XLA_", "CPU_NUM_DEVICES", "TF_CPP_MIN_LOG_LEVEL")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # Compiles faster; how the graph is split is decided before.
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

    def told() -> dict[str, Any]:
        command = [sys.executable, "-c", SHARDED, str(tmp_path)]
        ended = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        made: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        for name, error in made["errors"].items():
            assert error < (2e-6 if "float32" in name else 2e-2), name
        assert "does not read inner.mlp.e_score_correction_bias" in made["frozen"]
        assert made["sites"] == [["mlp", "out", "self_attn"]] * 4
        assert int(made["facts"]["sharded_parameters"]) > 0
        return made

    first = told()
    # Of MiniMax-M2 one graph for each type of number, of Llama one for the prompt and the steps.
    assert (first["counted"], first["said"]) == ([4, 0], [])
    cut = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    cut.write_bytes(cut.read_bytes()[:-9])
    again = told()
    assert again["counted"] == [1, 3]
    (line,) = again["said"]
    assert cut.name in line and "is damaged" in line and "compiled again" in line
    assert again["errors"] == first["errors"]
    assert again["facts"]["compiles"] == first["facts"]["compiles"]
