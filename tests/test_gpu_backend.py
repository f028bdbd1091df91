"""The gpu backend: on the CPU, from disk and compiled it gives the same numbers, or says why not.

Tests of a real GPU are skipped where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from layerparity.backends import switches
from layerparity.backends.known import gpu
from layerparity.ground.errors import UserError
from layerparity.machine import nvidia
from layerparity.settings.config import (
    Config,
    DeviceMapSettings,
    DType,
    GenerateSettings,
    RunKind,
)

HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not HEADER.is_file(),
    reason="needs a compiler and Python's headers: apt-get install g++ python3-dev",
)
# torch's compiler takes the processor's vectors all the same, and torch's headers have none then.
needs_vectors = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch.compile writes code that no compiler takes under ATEN_CPU_CAPABILITY=default",
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
GB = 10**9


def config_of(strategy="cpu", **keys):
    return Config(device_map=DeviceMapSettings(strategy), **keys)


def build(strategy="cpu", *, compiled=False, **keys):
    return gpu.build(gpu.Settings(compile=compiled), config_of(strategy, **keys))


@pytest.fixture
def opened():
    """Return a function that builds and opens a backend, which is closed after the test."""
    made = []

    def open_one(strategy="cpu", **keys):
        made.append(build(strategy, **keys))
        made[-1].open()
        return made[-1]

    yield open_one
    for backend in made:
        backend.close()


def minimax():
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    config = MiniMaxM2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rotary_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return MiniMaxM2ForCausalLM, config


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM, config


def filled(family, experts="grouped_mm"):
    gpu.build(gpu.Settings(), config_of())
    kind, config = family()
    options = {"experts_implementation": experts} if family is minimax else {}
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="sdpa", **options)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    return model.eval().requires_grad_(False)


def on_meta(family):
    kind, config = family()
    with torch.device("meta"):
        return kind._from_config(config, dtype=torch.float32)


STAGES = {
    "embed_tokens": "model.embed_tokens",
    "layers.0": "model.layers.0",
    "layers.1": "model.layers.1",
    "layers.2": "model.layers.2",
    "norm": "model.norm",
    "lm_head": "lm_head",
}


def inputs(model, tokens=8):
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, tokens))
    positions = torch.arange(tokens)[None].expand(2, tokens)
    tables = model.model.rotary_emb(torch.zeros(2, tokens, 32), positions)
    return ids, {"position_embeddings": tables, "position_ids": positions, "attention_mask": None}


def run(backend, model, release=False):
    """Put and run the stages in turn; return what each gave, and what the MLP of layer 1 saw."""
    value, arguments = inputs(model)
    seen = {}
    for stage, path in STAGES.items():
        module = model.get_submodule(path)
        backend.put(stage, module)
        extra = backend.send(stage, arguments) if stage.startswith("layers") else {}
        if stage == "layers.1":
            module.mlp.register_forward_hook(lambda _, __, out: seen.update(mlp=out))
        with torch.no_grad():
            value = module(backend.send(stage, value), **extra)
        seen[stage] = value
        if release:
            backend.release(stage)
    return backend.fetch(seen)


@pytest.fixture(scope="module", params=[minimax, llama], ids=["minimax_m2", "llama"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(family):
    """Return what the model gives with no backend at all: its own forward's states and logits."""
    model = filled(family)
    ids, arguments = inputs(model)
    seen = {}
    for stage, path in STAGES.items():
        model.get_submodule(path).register_forward_hook(
            lambda _, __, out, stage=stage: seen.update({stage: out})
        )
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: seen.update(mlp=out))
    with torch.no_grad():
        # Without a cache, which would lay keys and values out in another way.
        model(ids, position_ids=arguments["position_ids"], use_cache=False)
    return seen


def assert_same_bits(got, want):
    assert set(got) == set(want)
    for name, tensor in got.items():
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        assert torch.equal(tensor, want[name]), name


# ---------------------------------------------------------------- the three paths that run here


def test_the_cpu_gives_the_models_own_bits(family, expected, opened):
    backend = opened("cpu")
    (placed,) = backend.place(on_meta(family), STAGES)
    assert placed.device == "cpu" and placed.stages == tuple(STAGES)
    assert_same_bits(run(backend, filled(family)), expected)
    assert backend.device_label == "cpu" and not backend.warnings


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_without_a_gpu_everything_is_on_the_cpu_and_said_so(strategy, opened, monkeypatch):
    no_gpu(monkeypatch)
    backend = opened(strategy)
    (placed,) = backend.place(on_meta(llama), STAGES)
    assert placed.device == "cpu" and backend.device_label == "cpu"
    assert backend.warnings == [f"device_map={strategy}: no GPU here, everything runs on the CPU."]


def test_disk_offload_gives_the_same_bits(family, expected, opened, tmp_path, monkeypatch):
    no_gpu(monkeypatch)
    backend = opened("auto", max_memory="cpu:60KB", offload_folder=str(tmp_path / "new" / "here"))
    placed = {row.device: row for row in backend.place(on_meta(family), STAGES)}
    assert {"layers.1", "layers.2", "lm_head"} <= set(placed["disk"].stages)
    model = filled(family)
    assert_same_bits(run(backend, model), expected)
    # It really ran from disk: no weight is in memory, and the files are as large as the weights.
    assert all(p.is_meta for p in model.model.layers[1].parameters())
    files = [file for file in tmp_path.rglob("*.dat") if "layers.1" in file.parts]
    weights = sum(p.numel() * 4 for p in filled(family).model.layers[1].parameters())
    assert weights <= sum(file.stat().st_size for file in files) <= weights + 64
    assert any("wait on" in line and str(tmp_path) in line for line in backend.warnings)
    backend.close()
    assert not list((tmp_path / "new" / "here").iterdir())
    backend.close()


def test_weights_left_by_another_run_are_never_used(opened, tmp_path, monkeypatch):
    no_gpu(monkeypatch)
    keys = {"max_memory": "cpu:60KB", "offload_folder": str(tmp_path)}
    crashed = build("auto", **keys)
    crashed.place(on_meta(llama), STAGES)
    run(crashed, filled(llama))
    other = filled(llama)
    for weight in other.parameters():
        weight.mul_(1.5)
    backend = opened("auto", **keys)
    backend.place(on_meta(llama), STAGES)
    plain = opened("cpu")
    plain.place(on_meta(llama), STAGES)
    want = run(plain, filled_like(other))
    assert_same_bits(run(backend, other), want)
    crashed.close()


def filled_like(model):
    copy = filled(llama)
    copy.load_state_dict(model.state_dict())
    return copy


def test_a_released_stage_can_be_put_again_with_other_weights(opened, tmp_path, monkeypatch):
    no_gpu(monkeypatch)
    backend = opened("auto", max_memory="cpu:60KB", offload_folder=str(tmp_path))
    backend.place(on_meta(llama), STAGES)
    module, plain = filled(llama).model.norm, filled(llama).model.norm
    given = torch.randn(1, 2, 32)
    for factor in (1.0, 3.0):
        plain.weight.fill_(factor)
        module.weight = torch.nn.Parameter(plain.weight.clone(), requires_grad=False)
        backend.put("norm", module)
        assert module.weight.is_meta
        assert torch.equal(module(given), plain(given))
    backend.release("norm")
    assert module.weight.is_meta and not hasattr(module, "_hf_hook")
    assert not list(tmp_path.rglob("*.dat"))


def test_a_stage_that_failed_half_way_starts_with_an_empty_folder(tmp_path):
    from layerparity.backends.gpu.offload import OffloadFolder

    folder = OffloadFolder(str(tmp_path))
    folder.open(0)
    (folder.of("layers.0") / "index.json").write_text("{}")
    assert not list(folder.of("layers.0").iterdir())


def test_released_stages_give_the_same_bits(family, expected, opened, monkeypatch):
    no_gpu(monkeypatch)
    backend = opened("auto", max_memory="cpu:60KB")
    backend.place(on_meta(family), STAGES)
    assert_same_bits(run(backend, filled(family), release=True), expected)
    assert backend.memory_table() == []


def test_cpu_offload_gives_the_same_bits(family, expected):
    from layerparity.backends.gpu import offload

    model = filled(family)
    ids, arguments = inputs(model)
    for path in STAGES.values():
        offload.to_cpu(model.get_submodule(path), "cpu")
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        logits = model(ids, position_ids=arguments["position_ids"], use_cache=False).logits
    assert torch.equal(logits, expected["lm_head"])


def test_an_unwritable_folder_is_named_before_anything_loads(opened, tmp_path, monkeypatch):
    no_gpu(monkeypatch)
    (tmp_path / "file").write_text("not a folder")
    backend = opened("auto", max_memory="cpu:60KB", offload_folder=str(tmp_path / "file" / "x"))
    with pytest.raises(UserError, match=r"cannot be written to .*file/x .*offload_folder=PATH"):
        backend.place(on_meta(llama), STAGES)


def test_a_disk_too_small_is_named_before_anything_loads(opened, tmp_path, monkeypatch):
    no_gpu(monkeypatch)
    usage = namedtuple("usage", "total used free")(GB, GB, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    backend = opened("auto", max_memory="cpu:60KB", offload_folder=str(tmp_path))
    with pytest.raises(UserError, match="has 100B free: name a larger disk"):
        backend.place(on_meta(llama), STAGES)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_where_nothing_goes_to_disk(opened, tmp_path):
    backend = opened("cpu", offload_folder=str(tmp_path / "unused"))
    backend.place(on_meta(llama), STAGES)
    assert not (tmp_path / "unused").exists()


def test_too_small_a_limit_says_what_is_needed(opened, monkeypatch):
    no_gpu(monkeypatch)
    with pytest.raises(UserError, match=r"layers.0 alone needs 30\.98KB on cpu while it runs"):
        opened("auto", max_memory="cpu:10KB").place(on_meta(llama), STAGES)
    with pytest.raises(UserError, match=r"need \d+(\.\d+)?KB on cpu, which may hold 10KB"):
        opened("cpu", max_memory="cpu:10KB").place(on_meta(llama), STAGES)


# ---------------------------------------------------------------- a range, and pretended GPUs


def no_gpu(monkeypatch):
    pretend(monkeypatch, [])


def pretend(monkeypatch, free):
    from layerparity.backends.gpu import backend
    from layerparity.machine import gpus

    found = [gpus.Gpu(n, "NVIDIA H200", 141 * GB) for n in range(len(free))]
    monkeypatch.setattr(gpus, "gpus", lambda: found)
    monkeypatch.setattr(gpus, "free_gpu_memory", lambda: free)
    monkeypatch.setattr(backend, "free_host_memory", lambda: 10 * GB)


def test_a_range_takes_only_its_own_bytes(opened):
    stages = {stage: STAGES[stage] for stage in ("layers.1", "layers.2")}
    (placed,) = opened("cpu").place(on_meta(minimax), stages)
    weights = sum(p.numel() for p in on_meta(minimax).model.layers[1].parameters())
    assert placed.bytes == 2 * 4 * (weights + 4)  # 4 correction biases
    (half,) = opened("cpu", dtype=DType.bfloat16).place(on_meta(minimax), stages)
    assert half.bytes * 2 == placed.bytes


def test_a_component_is_a_stage(opened):
    (placed,) = opened("cpu").place(on_meta(minimax), {"layers.1.mlp": "model.layers.1.mlp"})
    assert placed.stages == ("layers.1.mlp",) and placed.bytes > 0


def test_a_plan_over_pretended_gpus(monkeypatch):
    pretend(monkeypatch, [100_000] * 4)
    backend = build("balanced")
    placed = backend.place(on_meta(minimax), STAGES)
    assert [row.device for row in placed] == sorted(row.device for row in placed)
    assert len(placed) > 1 and all(row.device.startswith("cuda") for row in placed)
    assert sorted(stage for row in placed for stage in row.stages) == sorted(STAGES)
    last = placed[-1].device[-1]
    assert backend.device_label == f"cuda:0-{last} {int(last) + 1}x NVIDIA H200"
    assert backend.spreads and not backend.warnings


def test_what_waits_on_the_cpu_is_said(monkeypatch):
    pretend(monkeypatch, [100_000, 100_000])
    backend = build("auto", max_memory="0:50KB")
    placed = {row.device: row for row in backend.place(on_meta(minimax), STAGES)}
    assert set(placed) == {"cuda:0", "cpu"}
    count = len(placed["cpu"].stages)
    assert backend.warnings[0].startswith(f"{count} of 6 stages")
    assert "wait on the CPU and are copied to cuda:0" in backend.warnings[0]
    # What waits on the CPU computes on the GPU, and the label says where a run computes.
    assert backend.device_label == "cuda:0 NVIDIA H200" and not backend.spreads


def test_the_label_before_and_after_a_single_gpu_is_placed(monkeypatch):
    pretend(monkeypatch, [GB] * 4)
    backend = build("cuda:2")
    backend.place(on_meta(llama), STAGES)
    assert backend.device_label == "cuda:2 NVIDIA H200"


def test_labels_with_gaps_and_two_kinds():
    from layerparity.machine.gpus import label

    names = ["A100"] * 4 + ["H200"] * 2
    assert label(["cpu", "cpu"], []) == "cpu"
    assert label(["cuda:0", "cuda:3", "cuda:1"], names) == "cuda:0-1,3 3x A100"
    assert label(["cuda:3", "cuda:4", "cuda:5"], names) == "cuda:3-5 1x A100, 2x H200"
    assert label([f"cuda:{n}" for n in (0, 10, 2)], ["X"] * 11) == "cuda:0,2,10 3x X"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("keys", [{"strategy": "cuda:3"}, {"max_memory": "3:60GB"}])
def test_a_gpu_that_is_not_there_is_refused_on_opening(keys, monkeypatch):
    no_gpu(monkeypatch)
    with pytest.raises(UserError, match=r"cuda:3 was asked for.* 0 GPUs: use device_map=cpu"):
        build(**{"strategy": "auto", **keys}).open()


def test_bad_words_are_refused_on_building():
    with pytest.raises(UserError, match="Did you mean 'balanced'"):
        build("ballanced")
    with pytest.raises(UserError, match="not a size"):
        build("auto", max_memory="60")


def test_tensor_parallel_is_refused():
    with pytest.raises(UserError, match=r"tp_degree=2: only port=hf is split .*: use tp_degree=1"):
        build("cpu", tp_degree=2).check(on_meta(llama))
    build("cpu", tp_degree=1).check(on_meta(llama))


# ---------------------------------------------------------------- sending, fetching, switches


def test_send_keeps_containers_and_what_is_no_tensor(opened):
    pair = namedtuple("pair", "left right")
    backend = opened("cpu")
    backend.place(on_meta(llama), STAGES)
    kept = object()
    value = {"a": (torch.ones(1), [None, 3, pair(torch.zeros(2), "x")]), "b": kept}
    sent = backend.send("layers.0", value)
    assert isinstance(sent["a"], tuple) and isinstance(sent["a"][1], list)
    assert isinstance(sent["a"][1][2], pair) and sent["b"] is kept
    assert torch.equal(sent["a"][1][2].left, torch.zeros(2))


def test_fetch_detaches_and_straightens(opened):
    tensor = torch.randn(3, 4, requires_grad=True).t()
    fetched = opened("cpu").fetch({"x": tensor})["x"]
    assert not fetched.requires_grad and fetched.is_contiguous()
    assert torch.equal(fetched, tensor.detach())


def test_tf32_is_off_while_open_and_given_back():
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        backend = build("cpu", threads=before[1] + 1)
        backend.open()
        backend.open()
        assert backend.numerics()["float32_matmul_precision"] == "highest"
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_num_threads() == before[1] + 1
        backend.close()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        assert torch.get_num_threads() == before[1]
    finally:
        torch.set_float32_matmul_precision(before[0])


@pytest.mark.parametrize("variable", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_a_golden_in_fewer_digits_than_float32_is_refused(monkeypatch, variable):
    """What a library under torch does whatever torch is told; a candidate's record says it."""
    monkeypatch.setenv(variable, "BF16")
    believed = build("cpu", kind=RunKind.golden)
    with pytest.raises(UserError, match=f"env -u {variable}"):
        believed.open()
    judged = build("cpu", kind=RunKind.candidate)
    judged.open()
    try:
        assert judged.numerics()[variable] == "BF16"
    finally:
        judged.close()
    monkeypatch.setenv(variable, "strict")
    believed.open()
    assert variable not in believed.numerics()
    believed.close()


def test_what_a_variable_does_to_a_gpu_is_asked_where_one_computes(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert switches.described(on_cuda=True)["NVIDIA_TF32_OVERRIDE"] == "1"
    with pytest.raises(UserError, match="env -u NVIDIA_TF32_OVERRIDE"):
        switches.refuse_fewer_digits(on_cuda=True)
    switches.refuse_fewer_digits(on_cuda=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    switches.refuse_fewer_digits(on_cuda=True)


def test_facts_and_memory_are_told(opened):
    backend = opened("cpu")
    backend.place(on_meta(llama), STAGES)
    run(backend, filled(llama))
    (row,) = backend.memory_table()
    assert (row.device, row.modules) == ("cpu", len(STAGES))
    assert 0 < row.allocated < row.reserved < row.total
    assert str(row).startswith("cpu: 6 modules, ")
    facts = backend.facts()
    assert not {"gpus", "gpu_count"} & facts.keys(), "what a run on the CPU leaves alone"
    assert facts["torch_threads"] == str(torch.get_num_threads())
    assert all(isinstance(value, str) for value in facts.values())


INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t 17
GPU UUID: \t GPU-00000000-0000-0000-0000-000000000000
Device Minor: \t {minor}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Pretend to have the files of a driver with three GPUs, two of which are given to us."""
    for name in ("nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    told = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n"
    (tmp_path / "version").write_text(told + "GCC version:  gcc version 12.2.0\n")
    for minor in range(3):
        folder = tmp_path / "gpus" / f"0000:{minor}1:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(minor=minor))
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_the_driver_version_is_read(driver):
    assert nvidia.driver_version() == "550.54.15"
    (driver / "version").unlink()
    assert nvidia.driver_version() == "unknown"


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("1", 1), ("0,1,2", 2), ("0,-1,1", 1), ("", 0), ("-1", 0)]
)
def test_gpus_are_counted_from_the_drivers_files(driver, monkeypatch, visible, count):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvidia.gpu_names() == ["NVIDIA H200"] * count


def test_a_gpu_without_a_listing_still_counts(driver):
    shutil.rmtree(driver / "gpus")
    assert nvidia.gpu_names() == ["NVIDIA GPU"] * 2
    (driver / "nvidia0").unlink()
    (driver / "nvidia2").unlink()
    assert nvidia.gpu_names() == []


# ---------------------------------------------------------------- torch.compile


class Watched(torch.nn.Module):
    """A block whose observed tensors are outputs, as a port makes it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, given, arguments):
        seen = {}
        handle = self.block.mlp.register_forward_hook(
            lambda _, __, out: seen.update({"mlp:out": out}) and None
        )
        try:
            return self.block(given, **arguments), seen
        finally:
            handle.remove()


@needs_compiler
@needs_vectors
def test_a_compiled_stage_shows_what_its_hooks_saw(opened):
    backend = opened("cpu", compiled=True)
    model = filled(minimax)
    _, arguments = inputs(model)
    given = torch.randn(2, 8, 32)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    blocks = model.model.layers[:2]
    # Beyond the limit torch.compile would quietly run eagerly: each block is a graph of its own.
    for block in blocks:
        stage = Watched(block)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            want, seen = stage(given, arguments)
            compiled = backend.compile(stage, (given, arguments))
            assert not isinstance(compiled, torch.nn.Module)
            got, watched = compiled(given, arguments)
            other = compiled(given * 2, arguments)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(watched["mlp:out"], seen["mlp:out"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other[0], stage(given * 2, arguments)[0], rtol=1e-5, atol=1e-6)
    assert counters["unique_graphs"] == len(blocks)
    assert backend.numerics()["torch_compile"] == "inductor"


@needs_compiler
@needs_vectors
def test_experts_are_compiled_in_bfloat16_too(opened):
    backend = opened("cpu", compiled=True)
    model = filled(minimax).to(torch.bfloat16)
    _, arguments = inputs(model)
    arguments["position_embeddings"] = tuple(x.bfloat16() for x in arguments["position_embeddings"])
    stage, given = Watched(model.model.layers[0]), torch.randn(2, 8, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        want, _ = stage(given, arguments)
        got, _ = backend.compile(stage, (given, arguments))(given, arguments)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_stage_is_left_alone_unless_compiling_was_asked_for(opened):
    backend, module = opened("cpu"), torch.nn.Linear(2, 2)
    assert backend.compile(module, ()) is module
    assert "torch_compile" not in backend.numerics()


@needs_compiler
def test_a_shape_that_depends_on_data_is_refused_in_one_line(opened, capfd):
    backend = opened("cpu", compiled=True)
    model = filled(minimax, experts="eager")
    _, arguments = inputs(model)
    with pytest.raises(UserError, match="use experts_implementation=grouped_mm"):
        backend.compile(Watched(model.model.layers[0]), (torch.randn(2, 8, 32), arguments))
    assert "aten" not in capfd.readouterr().err


@needs_compiler
def test_a_cache_is_not_compiled(opened):
    with pytest.raises(UserError, match=r"cannot take a cache: use generate\.max_new_tokens=0"):
        opened("cpu", compiled=True).compile(
            torch.nn.Identity(), (torch.ones(1), {"past_key_values": object()})
        )


def test_generation_is_not_compiled_and_said_so_on_building():
    with pytest.raises(UserError, match="cannot take a cache"):
        build("cpu", compiled=True, generate=GenerateSettings(max_new_tokens=4))


def test_without_a_compiler_the_install_line_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler is missing: apt-get install g\+\+"):
        build("cpu", compiled=True).open()
    build("cpu").open()


def test_without_pythons_headers_the_install_line_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UserError, match=r"Python\.h is missing: apt-get install .*python3-dev"):
        build("cpu", compiled=True).open()


def test_without_triton_cuda_names_the_cure(monkeypatch):
    import importlib.util

    pretend(monkeypatch, [GB])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="needs triton: pip install triton"):
        build("cuda:0", compiled=True).open()


@needs_compiler
def test_offloaded_weights_are_not_compiled(opened, monkeypatch):
    no_gpu(monkeypatch)
    with pytest.raises(UserError, match="offloaded weights cannot be compiled: raise max_memory"):
        opened("auto", compiled=True, max_memory="cpu:60KB").place(on_meta(llama), STAGES)


# ---------------------------------------------------------------- imports, and the real thing


def python(code, *arguments):
    """Run code in a process of its own, which nothing was imported into yet; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": str(Path(gpu.__file__).parents[3]),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_affinity_and_settings_import_no_torch_and_building_no_torch_xla():
    python("""
import sys
from layerparity.backends.known import gpu
gpu.affinity()
assert "torch" not in sys.modules, "affinity imported torch"
gpu.Settings()
from layerparity.settings.config import Config, DeviceMapSettings
gpu.build(gpu.Settings(), Config(device_map=DeviceMapSettings("cpu")))
assert "transformers" not in sys.modules
import accelerate.big_modeling
assert "torch_xla" not in sys.modules
""")


def test_where_there_is_a_gpu_the_help_names_it_and_imports_nothing_heavy(driver):
    code = """
import sys
from pathlib import Path
from layerparity.machine import nvidia
nvidia.DEVICE_FILES = nvidia.DRIVER = Path(sys.argv[1])
from layerparity.cli import help
print(help.text())
heavy = [name for name in ("torch", "mlflow", "transformers", "torch_xla") if name in sys.modules]
assert not heavy, heavy
"""
    (line,) = (line for line in python(code, str(driver)).splitlines() if "NVIDIA" in line)
    assert line.split() == ["gpu", "fits", "cuda:", "2", "GPUs:", "NVIDIA", "H200"]


def test_a_gpu_without_a_drivers_files_is_one_as_well(monkeypatch, tmp_path):
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (gpu.affinity().device, gpu.affinity().reason) == ("cuda", "2 GPUs: a GPU")


def test_affinity_says_what_is_here():
    said = gpu.affinity()
    count = torch.cuda.device_count()
    assert (said.score, said.device) == ((2, "cuda") if count else (1, "cpu"))
    assert str(count) in said.reason if count else "device_map=cpu" in said.reason


@needs_gpu
@pytest.mark.parametrize("strategy", ["cuda:0", "auto", "balanced_low_0", "sequential"])
def test_a_gpu_gives_the_same_within_float32(family, expected, opened, strategy):
    backend = opened(strategy)
    backend.place(on_meta(family), STAGES)
    got = run(backend, filled(family))
    assert backend.device_label.startswith("cuda:")
    assert backend.facts()["gpu_count"] == str(torch.cuda.device_count())
    for name, tensor in got.items():
        error = (tensor - expected[name]).norm() / expected[name].norm()
        assert tensor.device.type == "cpu" and error < 5e-6, name


@needs_gpu
def test_a_run_on_the_cpu_opens_no_context_on_a_gpu(tmp_path):
    said = python(
        """
import sys
from layerparity.cli import door
sys.argv = ["run.py", "backend=gpu", "device_map=cpu", "inputs=random", *sys.argv[1:]]
assert door.main() == 0
import torch
print("opened:", torch.cuda.is_initialized(), torch.cuda.device_count())
""",
        f"tracking.folder={tmp_path}",
    )
    assert said.splitlines()[-1].startswith("opened: False")


def test_a_gpu_that_is_not_to_be_had_is_said_in_a_line(monkeypatch):
    def refuse(_):
        raise torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy\nsee below")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    with pytest.raises(UserError, match="devices are busy: nvidia-smi shows who holds it"):
        build("auto").open()


@needs_gpu
def test_what_waits_on_the_cpu_and_on_disk_runs_on_the_gpu(family, opened):
    plain = opened("cuda:0")
    plain.place(on_meta(family), STAGES)
    want = run(plain, filled(family))
    backend = opened("auto", max_memory="0:50KB,cpu:60KB")
    placed = {row.device for row in backend.place(on_meta(family), STAGES)}
    assert "disk" in placed
    assert_same_bits(run(backend, filled(family)), want)
