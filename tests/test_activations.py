"""Quantised activations: an engine that packs what it multiplies is judged by that noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import folders
import pytest
import torch
from conftest import Ended
from fp8_small import BLOCK, fp8_copy
from packed_small import fill, packed_copy, rounding_inputs
from safetensors.torch import load_file, save_file
from torch import nn

from layerparity.model.activations import of_weight
from layerparity.model.checkpoint import Checkpoint
from layerparity.numbers.activations import Activations
from layerparity.record.recorded_operands import operands_of
from layerparity.record.verdict import Outcome, Verdict
from layerparity.recording import recording
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Quantise = Callable[[torch.Tensor], torch.Tensor]
PROMPT = torch.randint(3, 290, (1, 96), generator=torch.Generator().manual_seed(1))
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def by_token(values: torch.Tensor) -> torch.Tensor:
    return fp8(values, values.abs().amax(-1, keepdim=True) / 448)


def int8_by_token(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round().clamp(-128, 127) * scale


def nvfp4(values: torch.Tensor, overall: float = 0.02) -> torch.Tensor:
    groups = values.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6 / overall).to(torch.float8_e4m3fn).float()
    steps = groups / (scale * overall).clamp(min=1e-9)
    nearest = E2M1[(steps.abs()[..., None] - E2M1).abs().argmin(-1)] * steps.sign()
    return (nearest * scale * overall).flatten(-2)


class Scheme(NamedTuple):
    """What a checkpoint is packed in, what config.json says besides, and what an engine does."""

    form: str
    said: Mapping[str, Any]
    does: Quantise


FIRST = "layers.0.self_attn.q_proj:out"
SCHEMES = {
    "int8": Scheme("int8", {"type": "int", "strategy": "token"}, int8_by_token),
    "fp8": Scheme("fp8_by_row", {"type": "float", "strategy": "token"}, by_token),
    "fixed": Scheme("fp8_by_weight", {}, lambda x: fp8(x, torch.tensor(0.02))),
    "nvfp4": Scheme("nvfp4", {}, nvfp4),
    "int8_fixed": Scheme(
        "int8",
        {"type": "int", "strategy": "tensor", "dynamic": False},
        lambda x: (x / 0.05).round().clamp(-128, 127) * 0.05,
    ),
}


def quantised(source: Path, folder: Path, scheme: Scheme) -> Path:
    """Write a checkpoint packed as a scheme has it."""
    packed_copy(source, folder, scheme.form)
    return rounding_inputs(folder, **scheme.said) if scheme.said else folder


def engine(source: Path, folder: Path, does: Quantise, dtype: torch.dtype) -> nn.Module:
    """Return a model with dequantised weights, whose packed ones are given quantised inputs."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="eager"
    ).eval()
    checkpoint = Checkpoint(folder)
    names = list(checkpoint.unpacked.packed)
    fill(model, {name: checkpoint.value(name, torch.float32) for name in names})
    for name in names:
        if ".experts." in name:
            continue
        owner = model.get_submodule(name.removesuffix(".weight"))

        def forward(given: torch.Tensor, owner: nn.Linear = owner) -> torch.Tensor:
            return nn.functional.linear(does(given.float()).to(given.dtype), owner.weight)

        owner.forward = forward
    return model


def experts_of(does: Quantise) -> Callable[..., torch.Tensor]:
    """Return what transformers' experts compute, token by token, of quantised inputs."""

    def forward(
        self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        for token, experts, shares in zip(hidden, chosen, weights, strict=True):
            row = torch.zeros_like(token)
            for expert, share in zip(experts.tolist(), shares, strict=True):
                both = self.gate_up_proj[expert] @ does(token.float()).to(token.dtype)
                gate, up = both.chunk(2)
                inner = nn.functional.silu(gate) * up
                row += share * (self.down_proj[expert] @ does(inner.float()).to(token.dtype))
            rows.append(row)
        return torch.stack(rows)

    return forward


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.llama(tmp_path_factory.mktemp("plain") / "llama")


@pytest.fixture
def judged(cli: Cli, tmp_path: Path) -> Callable[..., tuple[Verdict, str]]:
    """Return a function that judges a recording, and gives what was said, too."""

    def judge(model: nn.Module, checkpoint: Path, *words: str) -> tuple[Verdict, str]:
        to = tmp_path / f"recorded{len(list(tmp_path.glob('recorded*')))}"
        with recording(model, to=to, sites="components"), torch.inference_mode():
            model(PROMPT)
        store = f"tracking.folder={tmp_path / to.name}-runs"
        of = (f"model.path={checkpoint}", "device_map=cpu", "name=judged", *words)
        ended = cli(store, "job=compare", "job.own_inputs=true", f"candidate={to}", *of)
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=f"{tmp_path / to.name}-runs")).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json"))), ended.out

    return judge


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_right_engine_passes_and_a_fault_is_found(
    judged: Callable[..., tuple[Verdict, str]],
    llama: Path,
    tmp_path: Path,
    name: str,
    dtype: torch.dtype,
) -> None:
    scheme = SCHEMES[name]
    folder = quantised(llama, tmp_path / "packed", scheme)
    model = engine(llama, folder, scheme.does, dtype)
    unsaid, out = judged(model, folder)
    if (name, dtype) == ("int8", torch.bfloat16):
        # Its steps are about as wide as bfloat16's.
        assert unsaid.outcome is Outcome.PASS
    else:
        assert (unsaid.outcome, str(unsaid.where)) == (Outcome.FAIL, FIRST)
        assert "activations are quantised before products, as config.json says" in out
        assert "operands=[activations] judges by it" in out
    right, out = judged(model, folder, "operands=[activations]")
    assert right.outcome is Outcome.PASS, (right.where, right.counts)
    shift = model.model.layers[1].self_attn.o_proj
    shift.weight.data = shift.weight.data.roll(16, 1)
    wrong, out = judged(model, folder, "operands=[activations]")
    assert (wrong.outcome, str(wrong.where)) == (Outcome.FAIL, "layers.1.self_attn:out")


def test_a_stored_scale_that_was_not_read_is_named(
    judged: Callable[..., tuple[Verdict, str]], llama: Path, tmp_path: Path
) -> None:
    folder = quantised(llama, tmp_path / "packed", SCHEMES["int8_fixed"])
    model = engine(llama, folder, lambda x: x.round().clamp(-128, 127), torch.bfloat16)
    wrong, out = judged(model, folder, "operands=[activations]")
    assert (wrong.outcome, str(wrong.where)) == (Outcome.FAIL, FIRST)
    assert "the stored scales of activations were not read: 1 was taken for each" in out
    assert "shown" in out


def test_experts_that_stand_in_one_weight_have_their_inputs_quantised(
    judged: Callable[..., tuple[Verdict, str]], tmp_path: Path
) -> None:
    source = folders.qwen3_moe(tmp_path / "plain", num_experts_per_tok=3)
    folder = quantised(source, tmp_path / "packed", SCHEMES["fp8"])
    model = engine(source, folder, by_token, torch.float32)
    sparse = [each.mlp.experts for each in model.model.layers if hasattr(each.mlp, "experts")]
    for experts in sparse:
        experts.forward = experts_of(by_token).__get__(experts)
    right, _ = judged(model, folder, "operands=[activations]")
    assert right.outcome is Outcome.PASS, (right.where, right.counts)
    for experts in sparse:
        experts.forward = experts_of(lambda x: by_token(x) * 1.06).__get__(experts)
    wrong, _ = judged(model, folder, "operands=[activations]")
    assert wrong.outcome is Outcome.FAIL
    assert str(wrong.where) == "layers.0.mlp.experts:out"


@pytest.mark.parametrize(
    ("form", "said", "means"),
    [
        ("fp8_by_row", {}, None),
        ("int8", {"type": "int", "strategy": "tensor"}, Activations("INT8", whole=True)),
        (
            "fp8_by_row",
            {"type": "float", "strategy": "group", "group_size": 32},
            Activations("FP8", 32),
        ),
        ("fp8_by_weight", {}, Activations("FP8", fixed=0.02)),
        ("nvfp4", {}, Activations("FP4", 16, fixed=0.02)),
        ("int8", {"type": "int", "strategy": "token", "symmetric": False}, None),
        ("awq", {}, None),
        ("gptq", {}, None),
    ],
)
def test_what_a_checkpoint_says_is_read(
    llama: Path, tmp_path: Path, form: str, said: dict[str, Any], means: Activations | None
) -> None:
    folder = quantised(llama, tmp_path / "packed", Scheme(form, said, by_token))
    found = of_weight(Checkpoint(folder), "model.layers.0.self_attn.q_proj.weight")
    assert found is not None or means is None
    assert found == (means._replace(fixed=pytest.approx(means.fixed)) if means else None)


QUERY = "model.layers.0.self_attn.q_proj.weight"
FP8_TOKENS = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
ROWS = {"type": "float", "num_bits": 8}


def grouped(**groups: tuple[list[str], Any]) -> dict[str, Any]:
    """Return compressed-tensors' groups of FP8 weights by name: their targets, and their inputs."""
    said = {
        name: {"targets": targets, "weights": ROWS, "input_activations": own}
        for name, (targets, own) in groups.items()
    }
    return {"quant_method": "compressed-tensors", "config_groups": said}


def quark(weight: str, inputs: Any, **layers: str) -> dict[str, Any]:
    """Return what Quark says of all modules, and of the patterns' own."""
    tensors = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}
    own = {
        name: {"weight": {"dtype": each}, "input_tensors": tensors} for name, each in layers.items()
    }
    said = {"weight": {"dtype": weight}, "input_tensors": inputs}
    return {"quant_method": "quark", "global_quant_config": said, "layer_quant_config": own}


FP4_GROUPS = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True}


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (grouped(a=(["Linear"], FP8_TOKENS)), Activations("FP8")),
        # The module's own group leaves its inputs as they are.
        (grouped(a=(["Linear"], FP8_TOKENS), b=(["re:.*self_attn.*"], None)), None),
        (grouped(a=(["re:.*mlp.*"], FP8_TOKENS), b=(["re:.*self_attn.*"], None)), None),
        (grouped(a=(["Linear"], FP8_TOKENS), b=([QUERY[:-7]], FP8_TOKENS)), Activations("FP8")),
        # Which of two groups of a class a module is in, nothing says.
        (grouped(a=(["Linear"], FP8_TOKENS), b=(["Other"], None)), None),
        (grouped(a=(["re:["], FP8_TOKENS)), Activations("FP8")),
        # A type, or bits, that are no such thing.
        (grouped(a=(["Linear"], {**FP8_TOKENS, "num_bits": [8]})), None),
        (grouped(a=(["Linear"], {**FP8_TOKENS, "type": {}})), None),
        (quark("fp4", FP4_GROUPS), None),
        (quark("fp4", FP4_GROUPS, **{"*self_attn*": "fp8_e4m3"}), Activations("FP8")),
        (quark("fp8_e4m3", None), None),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            Activations("FP8"),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, None),
        ({"quant_method": "fbgemm_fp8"}, Activations("FP8")),
    ],
)
def test_what_config_json_says_of_a_module_counts(
    llama: Path, tmp_path: Path, said: dict[str, Any], means: Activations | None
) -> None:
    folder = packed_copy(llama, tmp_path / "packed", "fp8_by_row")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    assert of_weight(Checkpoint(folder), QUERY) == means


def test_a_scale_that_was_never_measured_is_none(llama: Path, tmp_path: Path) -> None:
    folder = packed_copy(llama, tmp_path / "packed", "nvfp4_divided")
    rounding_inputs(
        folder, type="float", num_bits=4, strategy="tensor_group", group_size=16, dynamic="local"
    )
    tensors = load_file(folder / "model.safetensors")
    for scale, means in ((0.0, None), (math.nan, None), (50.0, Activations("FP4", 16, fixed=0.02))):
        tensors[QUERY.replace("weight", "input_global_scale")] = torch.tensor([scale])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        found = of_weight(Checkpoint(folder), QUERY)
        assert found == (means and means._replace(fixed=pytest.approx(0.02)))


def test_numbers_of_four_bits_may_have_inputs_of_eight(llama: Path, tmp_path: Path) -> None:
    folder = packed_copy(llama, tmp_path / "packed", "int4_zeros")
    rounding_inputs(folder, type="int", strategy="token")
    assert of_weight(Checkpoint(folder), QUERY) == Activations("INT8")


def test_the_recorder_tells_kernels_that_round_from_those_that_do_not() -> None:
    """Stand-ins with the names of vLLM's classes, whose kernels run on GPUs alone."""

    def engine(name: str, **held: Any) -> nn.Module:
        module = nn.Linear(2, 2)
        module.quant_method = type(name, (), held)()
        return nn.Sequential(nn.Linear(2, 2), module)

    def kernel(name: str) -> Any:
        return type(name, (), {})()

    backends = Enum("Backend", ["MARLIN", "TRITON"])
    rounds = [
        engine("Fp8LinearMethod", fp8_linear=kernel("CutlassFP8ScaledMMLinearKernel")),
        engine("Fp8MoEMethod", fp8_backend=backends.TRITON),
        engine("CompressedTensorsW8A8Int8", kernel=kernel("CPUInt8ScaledMMLinearKernel")),
        engine("CompressedTensorsW4A4Mxfp4MoEMethod", experts_cls=type("CutlassExperts", (), {})),
    ]
    leaves = [
        engine("UnquantizedLinearMethod"),
        engine("Fp8LinearMethod", fp8_linear=kernel("MarlinFP8ScaledMMLinearKernel")),
        engine("Fp8LinearMethod", fp8_linear=kernel("CPUFp8BlockScaledMMKernel")),
        engine("Fp8MoEMethod", fp8_backend=backends.MARLIN),
        engine("CompressedTensorsW8A16Fp8", kernel=kernel("XPUW8A16FP8LinearKernel")),
        engine("CompressedTensorsW4A4Nvfp4MoEMethod", nvfp4_backend=backends.MARLIN),
        engine("CompressedTensorsW4A4Nvfp4MoEMethod", use_a16=True),
        engine("CompressedTensorsW4A4Mxfp4MoEMethod", experts_cls=type("MarlinExperts", (), {})),
    ]
    assert [operands_of(each) for each in rounds] == [["activations"]] * len(rounds)
    assert [operands_of(each) for each in leaves] == [[]] * len(leaves)


def test_blocks_of_fp8_share_scales_that_may_be_powers_of_two(tmp_path: Path) -> None:
    folder = fp8_copy(folders.minimax_m2(tmp_path / "plain"), tmp_path / "fp8")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert of_weight(Checkpoint(folder), name) == Activations("FP8", BLOCK)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (folder / "config.json").write_text(json.dumps(config))
    assert of_weight(Checkpoint(folder), name) == Activations("FP8", BLOCK, powers=True)
    values = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    found = Activations("FP8", BLOCK, powers=True).rounded(values)
    groups = values.unflatten(-1, (-1, BLOCK))
    power = torch.exp2((groups.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    assert torch.equal(found, fp8(groups, power).flatten(-2))
    assert not torch.equal(found, Activations("FP8", BLOCK).rounded(values))


def test_ties_of_four_bits_go_to_the_even_number() -> None:
    """The midpoints of e2m1; the largest makes the scale 1."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0]
    values = torch.tensor([[*ties, 6.0, 0.3, 0.8, 1.3, 2.6, 3.6, 5.1]])
    found = Activations("FP4", 16, fixed=1.0).rounded(values)[0].tolist()
    assert found[:9] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -4.0]
    assert found[9:] == [6.0, 0.5, 1.0, 1.5, 3.0, 4.0, 6.0]


def test_our_own_port_computes_so_and_its_mistake_is_named(
    llama: Path, tmp_path: Path, cli: Cli
) -> None:
    folder = quantised(llama, tmp_path / "packed", SCHEMES["int8_fixed"])
    store = f"tracking.folder={tmp_path / 'runs'}"
    (tmp_path / "ids.json").write_text(json.dumps(PROMPT.tolist()))
    inputs = ("inputs=tokens", f"inputs.file={tmp_path / 'ids.json'}", "capture=components")
    made = (store, f"model.path={folder}", "backend=gpu", "device_map=cpu", *inputs)
    golden = cli(*made, "operands=[activations]", "name=golden")
    assert golden.exit == 0, golden.err
    assert "(INT8 by tensors): operands=[activations] judges those by it" in golden.out
    ports = {"right": "clean", "wrong": "fault"}
    names = {"right": "activations operands", "wrong": "input_scale_ignored"}
    for name, port in ports.items():
        planted = (f"port={port}", f"port.name={names[name]}", "operands=[activations]")
        assert cli(*made, *planted, "kind=candidate", f"name={name}").exit == 0
    right = cli("job=compare", store, "golden=golden", "candidate=right")
    assert right.exit == 0 and "PASS" in right.out, right.out
    assert "do not round their operands so" not in " ".join(right.out.split())
    wrong = cli("job=compare", store, "golden=golden", "candidate=wrong")
    assert wrong.exit == 1 and f"FAIL at {FIRST}" in wrong.out, wrong.out
    assert "shown (99 %): the stored scales of activations were not read" in wrong.out


def test_a_mistake_of_scales_wants_some(llama: Path, tmp_path: Path, cli: Cli) -> None:
    folder = quantised(llama, tmp_path / "packed", SCHEMES["int8"])
    made = (f"tracking.folder={tmp_path / 'runs'}", f"model.path={folder}", "device_map=cpu")
    planted = ("kind=candidate", "port=fault", "port.name=input_scale_ignored", "inputs=random")
    refused = cli(*made, *planted, "backend=gpu")
    assert refused.exit == 2
    assert "the checkpoint stores no scale of what this stage's weights multiply" in refused.err


def test_a_checkpoint_that_says_nothing_is_noted(llama: Path, tmp_path: Path, cli: Cli) -> None:
    made = (f"tracking.folder={tmp_path / 'runs'}", f"model.path={llama}", "device_map=cpu")
    golden = cli(*made, "backend=gpu", "operands=[activations]", "inputs=random", "seq_len=8")
    assert golden.exit == 0, golden.err
    assert "operands=[activations] changes nothing: config.json does not say" in golden.out
