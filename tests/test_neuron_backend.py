"""The neuron backend on XLA:CPU, for real: compiles, fallbacks, numbers, refusals."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from neuron_blocks import Watched, block, command, given, llama, minimax, qwen3_moe, rel_l2

from layerparity.anatomy import split_plan
from layerparity.anatomy.sizes import sizes_of
from layerparity.backends.known import neuron
from layerparity.backends.neuron.compiler_options import Compile
from layerparity.ground.errors import UserError
from layerparity.machine import neuron as machines
from layerparity.machine.neuron import RuntimeChoice

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    neuron.affinity().score == 0, reason=f"neuron: {neuron.affinity().reason}"
)


def opened(**settings: Any) -> Any:
    backend = neuron.build(neuron.Settings(**settings), command())
    backend.open()
    return backend


@pytest.fixture
def lazy() -> Iterator[Any]:
    backend = opened()
    yield backend
    backend.close()


@pytest.fixture
def exporting() -> Iterator[Any]:
    backend = opened(compile=Compile.export)
    yield backend
    backend.close()


def observe(backend: Any, config: Any, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Put a block, run it on host-made arguments, and fetch its output and sites."""
    hidden, arguments = given(config, dtype)
    module = Watched(block(config, index, dtype))
    backend.put(f"layers.{index}", module)
    sent = (backend.send("layers.0", hidden), backend.send("layers.0", arguments))
    with torch.no_grad():
        output, seen = backend.compile(module, sent)(*sent)
    fetched: dict[str, torch.Tensor] = backend.fetch({**seen, "out": output})
    return fetched


def eager(config: Any, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        hidden, arguments = given(config, dtype)
        output, seen = Watched(block(config, index, dtype))(hidden, arguments)
    return {**seen, "out": output}


CONFIGS = {"minimax_m2": minimax, "llama": llama}


@pytest.mark.parametrize("family", CONFIGS)
def test_two_blocks_of_a_shape_share_one_compile_and_agree(lazy: Any, family: str) -> None:
    for index in range(2):
        golden = eager(CONFIGS[family](), index, torch.float32)
        config = minimax("static") if family == "minimax_m2" else llama()
        candidate = observe(lazy, config, index, torch.float32)
        assert set(candidate) == {"self_attn", "mlp", "out"}
        for site, value in candidate.items():
            assert value.device.type == "cpu"
            assert value.is_contiguous()
            assert rel_l2(value, golden[site]) < 5e-6, site
    assert lazy.counters() == {"compiles": 1, "aten_fallbacks": 0, "aten_names": []}


def test_both_attention_implementations_and_mask_kinds_lower(lazy: Any) -> None:
    for attention in ("sdpa", "eager"):
        config = minimax("static", attention)
        golden = eager(minimax("eager", attention), 0, torch.float32)
        assert rel_l2(observe(lazy, config, 0, torch.float32)["out"], golden["out"]) < 5e-6
    assert lazy.counters()["aten_fallbacks"] == 0


def test_the_counters_see_a_compile_and_a_fallback(lazy: Any) -> None:
    mask = lazy.send("layers.0", torch.tensor([[0.0, 3.0], [5.0, 0.0]]))
    assert mask.nonzero().shape == (2, 2)
    torch.ones(3, device=mask.device).sum().item()
    lazy.fetch({})
    seen = lazy.counters()
    assert seen["compiles"] >= 1
    assert seen["aten_fallbacks"] >= 1
    assert "aten::_local_scalar_dense" in seen["aten_names"]
    assert "aten::_local_scalar_dense" in lazy.facts()["aten_fallbacks"]


def test_an_empty_fetch_synchronises(lazy: Any) -> None:
    pending = lazy.send("norm", torch.full((7, 5), 2.0)) * 3.5
    before = lazy.counters()["compiles"]
    assert lazy.fetch({}) == {}
    assert lazy.counters()["compiles"] == before + 1
    assert pending.cpu().eq(7.0).all()
    assert lazy.counters()["compiles"] == before + 1


def test_send_keeps_nesting_and_leaves_the_rest_alone(lazy: Any) -> None:
    x = torch.arange(3)
    sent = lazy.send("norm", {"a": (x, [x, None]), "b": True, "c": "text"})
    assert sent["a"][0].device.type == sent["a"][1][0].device.type == "xla"
    assert isinstance(sent["a"], tuple)
    assert isinstance(sent["a"][1], list)
    assert sent["a"][1][1] is None
    assert (sent["b"], sent["c"]) == (True, "text")


def test_put_moves_in_place_buffers_too(lazy: Any) -> None:
    module = block(minimax("static"), 0)
    lazy.put("layers.0", module)
    tensors = [*module.parameters(), *module.buffers()]
    assert {each.device.type for each in tensors} == {"xla"}
    assert module.to("meta").mlp.gate.weight.is_meta


def test_bfloat16_is_the_same_block_by_block_and_in_one_graph(lazy: Any) -> None:
    config = minimax("static")
    hidden, arguments = given(config, torch.bfloat16)
    blocks = [block(config, index, torch.bfloat16) for index in range(2)]
    for index, each in enumerate(blocks):
        lazy.put(f"layers.{index}", each)
    arguments = lazy.send("layers.0", arguments)
    ends = []
    for fetch_between in (True, False):
        state = lazy.send("layers.0", hidden)
        with torch.no_grad():
            for each in blocks:
                state = each(state, **arguments)
                if fetch_between:
                    lazy.fetch({})
        ends.append(lazy.fetch({"out": state})["out"])
    assert torch.equal(*ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_gives_the_same_sites_as_lazy(exporting: Any, dtype: torch.dtype) -> None:
    config = minimax("static")
    exported = observe(exporting, config, 0, dtype)
    assert exporting.counters()["aten_fallbacks"] == 0
    golden = eager(minimax("eager"), 0, dtype)
    with_lazy = opened()
    lazily = observe(with_lazy, config, 0, dtype)
    with_lazy.close()
    assert list(exported) == list(lazily)
    for site, value in exported.items():
        assert value.dtype == dtype
        assert rel_l2(value, lazily[site]) < (1e-6 if dtype is torch.float32 else 5e-3), site
        assert rel_l2(value, golden[site]) < (5e-6 if dtype is torch.float32 else 2e-2), site


class Twice(torch.nn.Module):
    """Takes a tensor twice, ignores a flag, gives its input back."""

    def forward(self, x: Any, y: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        z = x * 2 + y * named["scale"]
        return z, {"same": z, "in": x.clone(), "bias": named["bias"] + 1}


def test_export_keeps_structure_and_never_confuses_arguments(exporting: Any) -> None:
    x, y = (exporting.send("norm", torch.full((2, 3), value)) for value in (1.0, 10.0))
    named = {"scale": 3.0, "nothing": None, "bias": x}
    output, seen = exporting.compile(Twice(), (x, x, named))(x, x, named)
    assert output.cpu().eq(5).all()
    assert list(seen) == ["same", "in", "bias"]
    assert seen["bias"].cpu().eq(2).all()
    graph = exporting.compile(Twice(), (x, x, named))
    graph(x, x, named)
    assert graph(x, y, {**named, "bias": y})[0].cpu().eq(32).all()
    assert graph(x, y, {**named, "bias": y})[1]["bias"].cpu().eq(11).all()
    longer = exporting.send("norm", torch.ones(5, 3))
    assert graph(longer, longer, {**named, "bias": longer})[0].shape == (5, 3)


class Attends(torch.nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_an_exported_row_that_sees_no_key_is_no_nan(exporting: Any) -> None:
    """A padded row; its NaN would reach the real ones in the next block."""
    x = torch.randn(1, 1, 3, 4)
    mask = torch.tensor([[False, False, False], [False, True, False], [False, True, True]])
    sent = (exporting.send("norm", x), exporting.send("norm", mask[None, None]))
    got = exporting.compile(Attends(), sent)(*sent).cpu()
    torch.testing.assert_close(got, Attends()(x, mask[None, None]))
    assert got[0, 0, 0].eq(0).all()


def test_lowering_loses_no_fallback_counted_before(exporting: Any) -> None:
    x = exporting.send("norm", torch.ones(4))
    x.sum().item()
    before = exporting.counters()
    assert before["aten_fallbacks"] >= 1
    exporting.compile(torch.nn.ReLU(), (x,))(x)
    assert exporting.counters()["aten_names"] == before["aten_names"]


class Writes(torch.nn.Module):
    def __init__(self, to_buffer: bool) -> None:
        super().__init__()
        self.total = torch.nn.Buffer(torch.zeros(2, 2))
        self.to_buffer = to_buffer

    def forward(self, x: Any) -> Any:
        own = x * 2
        own += 1
        (self.total if self.to_buffer else x)[0].view(2).mul_(3)
        return self.total * 2 + own


def test_export_refuses_what_a_graph_would_lose(exporting: Any) -> None:
    x = exporting.send("norm", torch.ones(2, 2))
    for to_buffer, name in ((True, "total"), (False, "x")):
        module = Writes(to_buffer)
        exporting.put("norm", module)
        with pytest.raises(UserError, match=rf"writes to {name} .*compile=lazy"):
            exporting.compile(module, (x,))(x)
    with pytest.raises(UserError, match="takes no such cache"):
        exporting.compile(torch.nn.ReLU(), (object(),))(object())


def test_export_refuses_shapes_that_depend_on_data(exporting: Any, capfd: Any) -> None:
    with pytest.raises(UserError, match="experts_implementation=static"):
        observe(exporting, minimax("eager"), 0, torch.float32)
    assert capfd.readouterr().err == ""


def test_what_libraries_say_of_the_layout_is_recorded_while_open() -> None:
    backend = opened()
    said = "TP degree (1) and KV heads (8) are not divisible. Overriding to GQA.CONVERT_TO_MHA!"
    for _ in range(2):
        logging.getLogger("Neuron").warning(said)
    logging.getLogger("Neuron").info("nothing to do with it")
    backend.close()
    backend.close()
    logging.getLogger("Neuron").warning("too late")
    assert backend.warnings == [f"Neuron: {said}"]


def test_python_warnings_are_recorded_too(recwarn: Any) -> None:
    backend = opened()
    warnings.warn("weights are replicated over 2 ranks", stacklevel=1)
    warnings.warn("nothing to do with it", stacklevel=1)
    backend.close()
    assert backend.warnings == ["UserWarning: weights are replicated over 2 ranks"]


def test_a_run_remembers_what_it_ran_on(lazy: Any) -> None:
    assert lazy.device_label == "XLA:CPU, not Neuron"
    assert (lazy.attn_implementation, lazy.experts_implementation) == (None, "static")
    facts = lazy.facts()
    assert facts["PJRT_DEVICE"] == facts["xla_hardware"] == "CPU"
    assert facts["world_size"] == facts["tp_granted"] == facts["xla_devices"] == "1"
    assert facts["torch_xla"].startswith("2.")
    assert "--xla_allow_excess_precision=false" in lazy.numerics()["XLA_FLAGS"]


def test_the_fingerprint_is_known_before_the_device_is_taken(lazy: Any) -> None:
    closed = neuron.build(neuron.Settings(), command())
    assert closed.numerics() == lazy.numerics()
    exports = neuron.build(neuron.Settings(compile=Compile.export), command())
    assert exports.numerics() != lazy.numerics()
    assert closed.facts() == {}


def test_placement_is_one_device_with_the_bytes_of_the_weights(lazy: Any) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16)
    stages = {"layers.0": "model.layers.0", "norm": "model.norm"}
    (placed,) = lazy.place(model, stages)
    assert placed.device == lazy.device_label
    assert placed.stages == ("layers.0", "norm")
    weights = sum(each.numel() for each in model.model.layers[0].parameters())
    assert placed.bytes == 2 * (weights + 64)


def model_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_refuses_implementations_that_cannot_compile(lazy: Any) -> None:
    lazy.check(model_of(minimax()))
    lazy.experts_implementation = "grouped_mm"
    lazy.check(model_of(llama()))
    with pytest.raises(UserError, match=r"experts_implementation=grouped_mm .*static"):
        lazy.check(model_of(minimax()))
    lazy.attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match=r"attn_implementation=flash_attention_2 .*sdpa"):
        lazy.check(model_of(llama()))


def plan_of(config: Any, degree: int = 2) -> dict[str, str]:
    return split_plan.split_plan(config, sizes_of(config).kv_heads, degree)


def test_a_model_without_a_plan_is_refused_with_the_cure() -> None:
    for config in (llama(), minimax(), qwen3_moe()):
        split_plan.check(config, 64)
    bare = llama()
    bare.base_model_tp_plan = None
    split_plan.check(bare, 1)
    with pytest.raises(
        UserError, match=r"llama cannot be \(it has no such plan\): use tp_degree=1"
    ):
        split_plan.check(bare, 2)
    bare.base_model_tp_plan = {"layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(UserError, match=r"plan for it has sideways"):
        split_plan.check(bare, 2)


def test_what_a_degree_does_not_divide_is_said() -> None:
    sizes = sizes_of(llama(num_attention_heads=8, num_key_value_heads=2)).divided
    assert split_plan.notes(sizes, 1) == split_plan.notes(sizes, 2) == []
    (said,) = split_plan.notes(sizes, 4)
    assert said.startswith("tp_degree=4 does not divide 2 KV heads: ")
    (said,) = split_plan.notes(sizes, 5)
    assert "8 attention heads, 2 KV heads, 96 intermediate size" in said


def test_the_plan_says_what_is_split() -> None:
    plan, whole = plan_of(llama()), block(llama(), 0)
    split = split_plan.split_dimensions(plan, "model.layers.0", whole)
    assert split["self_attn.q_proj.weight"] == split["self_attn.q_proj.bias"] == 0
    assert split["self_attn.o_proj.weight"] == split["mlp.down_proj.weight"] == 1
    assert "self_attn.o_proj.bias" not in split
    assert "input_layernorm.weight" not in split
    part = split_plan.split_dimensions(plan, "layers.0.mlp", whole.mlp)
    assert part == {
        name.removeprefix("mlp."): way for name, way in split.items() if name.startswith("mlp.")
    }
    alone = split_plan.split_dimensions(plan, "model.layers.11.mlp.up_proj", whole.mlp.up_proj)
    assert alone == {"weight": 0, "bias": 0}
    assert split_plan.split_dimensions(plan, "model.embed_tokens", whole.mlp.up_proj) == {}


def test_keys_and_values_of_too_few_heads_are_copied() -> None:
    split = split_plan.split_dimensions(plan_of(llama(), 4), "layers.0", block(llama(), 0))
    assert "self_attn.q_proj.weight" in split
    assert not {"self_attn.k_proj.weight", "self_attn.v_proj.bias"} & set(split)


def test_experts_are_split_by_width_or_by_number_as_the_plan_says() -> None:
    whole = block(minimax("static"), 0)
    split = split_plan.split_dimensions(plan_of(minimax()), "layers.0", whole)
    # Stacked weights are [expert, 2 * width, hidden] and [expert, hidden, width].
    assert (split["mlp.experts.gate_up_proj"], split["mlp.experts.down_proj"]) == (1, 2)
    assert not {"mlp.gate.weight", "self_attn.q_norm.weight"} & set(split)
    by_number = {
        "layers.*.mlp.experts": "ep_dispatch_experts",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
    }
    config = minimax()
    config.base_model_tp_plan = by_number
    split = split_plan.split_dimensions(plan_of(config), "layers.0", whole)
    assert split == {"mlp.experts.gate_up_proj": 0, "mlp.experts.down_proj": 0}


def test_what_groups_of_devices_share_is_stacked_experts() -> None:
    whole = block(minimax("static"), 0)
    stacked = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert split_plan.experts_in(minimax(), "model.layers.0", whole) == stacked
    inside = split_plan.experts_in(minimax(), "layers.0.mlp", whole.mlp)
    assert inside == {name.removeprefix("mlp.") for name in stacked}
    assert split_plan.experts_in(llama(), "layers.0", block(llama(), 0)) == set()


def test_one_process_has_one_degree_and_one_set_of_flags(lazy: Any) -> None:
    with pytest.raises(UserError, match=r"XLA already runs.*command of its own"):
        neuron.build(neuron.Settings(), command(tp_degree=2))
    with pytest.raises(UserError, match=r"XLA already runs.*XLA_FLAGS"):
        neuron.build(neuron.Settings(excess_precision=True), command())


@pytest.mark.parametrize("key", ["max_memory", "offload_folder", "threads"])
def test_what_would_be_ignored_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} is for backend=gpu"):
        neuron.build(neuron.Settings(), command(**{key: "1"}))


def test_a_users_own_flag_wins() -> None:
    from layerparity.backends.neuron.compiler_options import cpu_flags, with_flags

    flags = with_flags("--xla_allow_excess_precision=true --mine", cpu_flags(False)).split()
    assert "--xla_allow_excess_precision=true" in flags
    assert "--xla_allow_excess_precision=false" not in flags
    assert "--xla_cpu_enable_fast_math=false" in flags
    assert flags.count("--mine") == 1
    assert with_flags(" ".join(flags), cpu_flags(False)).split() == flags


SPMD = """
import json, sys
import torch
from neuron_blocks import block, command, given, llama, minimax, qwen3_moe, rel_l2
from layerparity.backends.known import neuron
from layerparity.ground.errors import UserError

degree, groups = map(int, sys.argv[1:])
backend = neuron.build(neuron.Settings(), command(tp_degree=degree, moe_ep_degree=groups))
backend.open()
import torch_xla
from transformers import AutoModelForCausalLM

odd = llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=100)
by_number = qwen3_moe()
plan = {**by_number.base_model_tp_plan, "layers.*.mlp.experts.gate_up_proj": "grouped_gemm"}
by_number.base_model_tp_plan = {**plan, "layers.*.mlp.experts.down_proj": "grouped_gemm"}
configs = {"llama": llama(), "minimax": minimax("static"), "qwen": qwen3_moe()}
if groups == 1 and degree == 4:
    configs |= {"odd": odd, "number": by_number}
told = {"errors": {}, "compiles": {}, "notes": {}}
for name, config in configs.items():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    backend.check(model)
    said = len(backend.warnings)
    backend.place(model, {f"layers.{i}": f"model.layers.{i}" for i in range(2)})
    told["notes"][name] = backend.warnings[said:]
    before = backend.counters()["compiles"]
    for dtype in (torch.float32, torch.bfloat16)[: 2 if (name, degree) == ("minimax", 2) else 1]:
        hidden, arguments = given(config, dtype)
        for index in range(2):
            whole = block(config, index, dtype)
            with torch.no_grad():
                golden = whole(hidden, **arguments) - hidden
            backend.put(f"layers.{index}", whole)
            sent = backend.send("layers.0", hidden), backend.send("layers.0", arguments)
            with torch.no_grad():
                output = whole(sent[0], **sent[1])
            error = rel_l2(backend.fetch({"out": output})["out"] - hidden, golden)
            told["errors"][f"{name} {dtype} {index}"] = error
    told["compiles"][name] = backend.counters()["compiles"] - before
    if name in ("llama", "minimax"):
        told[name] = {
            key: list(torch_xla._XLAC._get_local_shards([value])[0][0][0].shape)
            for key, value in whole.named_parameters()
        }
told["counted"], told["facts"] = backend.counters(), backend.facts()
backend.close()
try:
    neuron.build(neuron.Settings(), command())
    told["refused"] = ""
except UserError as error:
    told["refused"] = str(error)
print(json.dumps(told))
"""


@pytest.mark.parametrize(("degree", "groups"), [(2, 1), (4, 1), (8, 1), (4, 2)])
def test_spmd_tensor_parallel_agrees_with_the_unsharded_block(degree: int, groups: int) -> None:
    """Families by their plans, sizes that do not divide, and experts by number, for real."""
    # torch_xla wrote some variables of this process; the other one starts without them.
    ours = ("PJRT_", "XLA_", "CPU_NUM_DEVICES", "TF_CPP_MIN_LOG_LEVEL")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    # Compiles faster; what is split is decided before.
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    ended = subprocess.run(
        [sys.executable, "-c", SPMD, str(degree), str(groups)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    told = json.loads(ended.stdout.splitlines()[-1])
    for name, error in told["errors"].items():
        assert error < (2e-6 if "float32" in name else 2e-2), name
    more = {"odd": 1, "number": 1} if (degree, groups) == (4, 1) else {}
    # One graph for both blocks of a type.
    assert told["compiles"] == {"llama": 1, "minimax": 2 if degree == 2 else 1, "qwen": 1, **more}
    assert len(told["errors"]) == 2 * sum(told["compiles"].values())
    assert told["counted"]["aten_fallbacks"] == 0
    llamas, minimaxes = told["llama"], told["minimax"]
    assert llamas["self_attn.q_proj.weight"] == [64 // degree, 64]
    assert llamas["self_attn.o_proj.weight"] == [64, 64 // degree]
    assert llamas["self_attn.k_proj.bias"] == [16 if degree == 2 else 32]
    width = degree // groups
    assert minimaxes["mlp.experts.gate_up_proj"] == [8 // groups, 96 // width, 64]
    assert minimaxes["mlp.experts.down_proj"] == [8 // groups, 64, 48 // width]
    assert minimaxes["self_attn.q_norm.weight"] == [64]
    assert bool(told["notes"]["minimax"]) is (degree > 2)
    if (degree, groups) == (4, 1):
        assert "does not divide 6 attention heads, 3 KV heads: XLA pads" in str(told["notes"])
    assert told["facts"]["tp_granted"] == told["facts"]["xla_devices"] == str(degree)
    assert int(told["facts"]["sharded_parameters"]) > 0
    assert "tp" in told["refused"]


def test_affinity_is_cheap() -> None:
    code = (
        "import sys; from layerparity.backends.known import neuron; neuron.affinity();"
        "print([m for m in ('torch', 'torch_xla', 'transformers') if m in sys.modules])"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=path, check=False, capture_output=True, text=True
    )
    assert ended.stdout.strip() == "[]", ended.stderr


def test_without_torch_xla_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert neuron.affinity().score == 0
    with pytest.raises(UserError, match=r"torch_xla is not installed.*torch_xla==2.9.0.*AWS"):
        neuron.build(neuron.Settings(), command())


def package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


@pytest.fixture
def trainium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend to have two Neuron devices; the returned folder is importable."""
    (tmp_path / "dev").mkdir()
    for name in ("neuron0", "neuron1", "neuron_monitor"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(machines, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_real_packages_beside_devices_are_neuron(trainium: Path) -> None:
    package(trainium, "torch_neuronx", "__version__ = '2.9'\ndef trace(): ...\n")
    found = neuron.affinity()
    assert (found.score, found.device) == (2, "Neuron")
    assert found.reason.startswith("2 Neuron devices")
    assert machines.detect(RuntimeChoice.xla_cpu).score == 1


def test_a_placeholder_is_not_a_package(trainium: Path) -> None:
    package(trainium, "torch_neuronx", "raise ImportError('WRONG PACKAGE')\n")
    found = neuron.affinity()
    assert found.score == 0
    assert "placeholder" in found.reason
    with pytest.raises(UserError, match=r"backend\.runtime=xla_cpu"):
        neuron.build(neuron.Settings(), command())


@pytest.mark.parametrize(
    ("asked", "choice", "score"),
    [
        ("CPU", RuntimeChoice.auto, 1),
        ("CPU", RuntimeChoice.xla_cpu, 1),
        ("CPU", RuntimeChoice.xla, 0),
        (None, RuntimeChoice.auto, 1),
        (None, RuntimeChoice.xla_cpu, 1),
        (None, RuntimeChoice.xla, 0),
        ("NEURON", RuntimeChoice.auto, 0),
        ("NEURON", RuntimeChoice.xla_cpu, 0),
        ("TPU", RuntimeChoice.auto, 0),
    ],
)
def test_detection_without_devices(
    asked: str | None,
    choice: RuntimeChoice,
    score: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(machines, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    if asked:
        monkeypatch.setenv("PJRT_DEVICE", asked)
    assert machines.detect(choice).score == score
