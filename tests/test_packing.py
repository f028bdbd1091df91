"""Checkpoints as they are published packed: read, audited, run, converted, and their mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import packing_mistakes
import pytest
import torch
from conftest import Ended
from packed_small import FORMATS, gptq, packed_copy
from safetensors.torch import load_file, save_file

from layerparity.checkpoint.audit import examine
from layerparity.ground.errors import UserError
from layerparity.mistakes.catalogue import known_fault
from layerparity.mistakes.fault import Quantised, Surgery
from layerparity.mistakes.hypotheses import hypotheses
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.filling import Filler
from layerparity.model.packed import pieces_of
from layerparity.model.packing import settings_of
from layerparity.numbers.pieces import Pieces

Cli = Callable[..., Ended]
# By format: the family whose checkpoint is packed so, as vendors do.
FAMILIES = {
    **dict.fromkeys(("awq", "gptq", "int4_zeros", "int8", "fp8_by_row"), "llama"),
    **dict.fromkeys(("fp8_by_weight", "nvfp4"), "llama"),
    **dict.fromkeys(("int4", "nvfp4_divided"), "qwen3_moe"),
    "mxfp4": "gpt_oss",
}
# The step of each kind of number, over the largest of a group: half of it is lost at most.
ROUNDS = {"INT4": 2 / 15, "INT8": 2 / 254, "F8_E4M3": 1 / 8, "NVFP4": 1 / 2, "MXFP4": 1 / 2}
IDS = [torch.randint(10, 90, (40,), generator=torch.Generator().manual_seed(1)).tolist()]


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a small checkpoint packed in a format, made once."""
    base = tmp_path_factory.mktemp("packed")

    def make(form: str) -> Path:
        family = FAMILIES[form]
        if not (base / family).is_dir():
            getattr(folders, family)(base / family)
        folder = base / form
        return folder if folder.is_dir() else packed_copy(base / family, folder, form)

    return make


def edited(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Write a copy of a folder of one file whose tensors were changed."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("form", FORMATS)
def test_the_values_are_the_weights_to_the_format(packed: Callable[[str], Path], form: str) -> None:
    checkpoint = Checkpoint(packed(form))
    plain = Checkpoint(packed(form).parent / FAMILIES[form])
    assert checkpoint.tensors.keys() == plain.tensors.keys()
    assert not checkpoint.unpacked.faults
    (kind,) = checkpoint.unpacked.kinds
    for name, weight in checkpoint.unpacked.packed.items():
        values, right = (each.value(name, torch.float32) for each in (checkpoint, plain))
        assert values.shape == right.shape == weight.shape
        assert (values - right).abs().max() <= ROUNDS[kind] * right.abs().max(), name
        assert checkpoint.value(name).dtype == torch.bfloat16
        assert torch.equal(checkpoint.value(name), values.bfloat16())


def test_mxfp4_is_what_transformers_makes_of_it(packed: Callable[[str], Path]) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    checkpoint = Checkpoint(packed("mxfp4"))
    stored = load_file(packed("mxfp4") / "model.safetensors")
    assert len(checkpoint.unpacked.packed) == 6
    for name in checkpoint.unpacked.packed:
        parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        theirs = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)
        assert torch.equal(checkpoint.value(name), theirs), name


def test_what_modelopt_says_in_a_file_of_its_own_is_read(
    packed: Callable[[str], Path], tmp_path: Path, cli: Cli
) -> None:
    """So most of NVIDIA's checkpoints are published: config.json says nothing of it."""
    whole, folder = packed("nvfp4"), tmp_path / "apart"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    said = json.loads((whole / "config.json").read_text())
    keys = said.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(said))
    ended = cli(f"model.path={folder}", "device_map=cpu", "backend=gpu", "inputs=random")
    assert ended.exit == 2 and "is stored as U8, and nothing says how it is packed" in ended.err
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": keys["quant_algo"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    checkpoint = Checkpoint(folder)
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.value(name), Checkpoint(whole).value(name)), name
    ended = cli("job=convert", f"model.path={folder}", f"to={tmp_path / 'plain'}")
    assert ended.exit == 0, ended.err
    assert not (tmp_path / "plain/hf_quant_config.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_who_quantised_is_found_or_said() -> None:
    own = {"quant_algo": "FP8", "producer": {"name": "modelopt"}}
    assert settings_of({"quantization_config": own}).method == "modelopt"
    for keys, said in (({"bits": 4, "group_size": 64}, "MLX"), ({}, "what it does not name")):
        with pytest.raises(UserError, match=f"quantised by {said}, which is not read"):
            settings_of({"quantization_config": keys})


def test_a_scale_that_each_expert_of_a_stack_has_is_its_own(tmp_path: Path) -> None:
    """Mistral publishes its experts so."""
    generator = torch.Generator().manual_seed(5)
    held = torch.randn(4, 6, 8, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 1, 1, generator=generator).bfloat16()
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        name: held,
        f"{name}_scale_inv": scales,
        f"{name}_activation_scale": scales[:, 0, 0].clone(),
    }
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert [*checkpoint.tensors] == [name]
    assert torch.equal(checkpoint.value(name, torch.float32), held.float() * scales.float())


def test_an_order_of_columns_that_is_none_is_left_out(tmp_path: Path) -> None:
    """An act-order that is the usual one changes nothing, and another is followed."""
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(3))
    values = []
    for number, act_order in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = {"model_type": "llama", "num_hidden_layers": 1, "dtype": "float32"}
        said = {**config, "quantization_config": FORMATS["gptq"][1]}
        (folder / "config.json").write_text(json.dumps(said))
        save_file(gptq("x.weight", weight, act_order), folder / "model.safetensors")
        values.append(Checkpoint(folder).value("x.weight"))
    for each in values:
        assert (each - weight).norm() < 0.12 * weight.norm()
    assert not torch.equal(*values)


def drop(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return what takes the first tensor away whose name ends so."""
    return lambda tensors: tensors.pop(next(n for n in sorted(tensors) if n.endswith(end)))


def shorten(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return what halves the first tensor whose name ends so."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(n for n in sorted(tensors) if n.endswith(end))
        tensors[name] = tensors[name][: len(tensors[name]) // 2].contiguous()

    return change


def narrow(end: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return what stores the first tensor whose name ends so in eight bits."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(n for n in sorted(tensors) if n.endswith(end))
        tensors[name] = tensors[name].to(torch.int8)

    return change


def added(last: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return what puts another tensor beside the first scale of a weight."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(n for n in sorted(tensors) if n.endswith("weight_scale"))
        tensors[name.replace("weight_scale", last)] = torch.ones(4)

    return change


@pytest.mark.parametrize(
    ("form", "change", "what"),
    [
        ("int4", shorten("weight_scale"), "scale_shape"),
        ("awq", shorten("qzeros"), "scale_shape"),
        ("gptq", shorten(".scales"), "scale_shape"),
        ("nvfp4", drop("weight_scale_2"), "scale_missing"),
        ("mxfp4", shorten("_scales"), "scale_shape"),
        ("fp8_by_row", drop("weight_scale"), "scale_missing"),
        ("int8", shorten("weight_scale"), "scale_shape"),
        ("int4_zeros", narrow("weight_zero_point"), "scale_type"),
        ("gptq", shorten("g_idx"), "scale_shape"),
        ("nvfp4", added("pre_quant_scale"), "scale_unread"),
    ],
)
def test_damage_is_named_and_refused(
    packed: Callable[[str], Path], tmp_path: Path, form: str, change: Any, what: str
) -> None:
    folder = edited(packed(form), tmp_path / "damaged", change)
    found = examine(Checkpoint(folder)).problems
    assert what in {each.what for each in found}, [each.text for each in found]
    (fault, *_) = Checkpoint(folder).unpacked.faults
    with pytest.raises(UserError):
        Checkpoint(folder).value(fault)


def test_what_is_not_read_is_refused_in_a_line(packed: Callable[[str], Path], cli: Cli) -> None:
    folder = packed("awq")
    file = folder / "config.json"
    said = file.read_text()
    config = json.loads(said)
    unread = {
        "quantised by bitsandbytes, which is not read: auto-round, awq,": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
        },
        "weights were rotated": {
            **FORMATS["int4"][1],
            "transform_config": {"u": {"type": "hadamard"}},
        },
    }
    for says, quantization in unread.items():
        config["quantization_config"] = quantization
        try:
            file.write_text(json.dumps(config))
            ended = cli("job=plan", f"model.path={folder}")
        finally:
            file.write_text(said)
        assert ended.exit == 2 and says in ended.err
        assert len(ended.err.splitlines()) == 1


def test_a_quantization_that_no_weight_has_is_said(tmp_path: Path, cli: Cli) -> None:
    folder = folders.llama(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    for method in ("fp8", "awq"):
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
        ended = cli("job=plan", f"model.path={folder}")
        assert ended.exit == 0, ended.err
        assert f"the weights are quantised by {method}, and none is: they are taken" in ended.out


@pytest.mark.parametrize("form", ["mxfp4", "gptq"])
def test_a_converted_checkpoint_holds_the_same_values(
    packed: Callable[[str], Path], tmp_path: Path, cli: Cli, form: str
) -> None:
    checkpoint = Checkpoint(packed(form))
    ended = cli("job=convert", f"model.path={packed(form)}", f"to={tmp_path / 'to'}")
    assert ended.exit == 0, ended.err
    made = Checkpoint(tmp_path / "to")
    assert not made.unpacked.packed
    assert made.tensors.keys() == checkpoint.tensors.keys()
    for name in made.tensors:
        assert torch.equal(made.value(name), checkpoint.value(name)), name


@pytest.mark.parametrize("form", FORMATS)
def test_audit_and_plan_take_it(packed: Callable[[str], Path], cli: Cli, form: str) -> None:
    audit = examine(Checkpoint(packed(form)), deep=True)
    # transformers begins with biases of zero.
    assert {each.what for each in audit.problems} <= {"all_zero"}
    plain = examine(Checkpoint(packed(form).parent / FAMILIES[form]))
    assert audit.sizes.parameters == plain.sizes.parameters == audit.parameters
    assert audit.deep is not None and audit.deep.tensors == audit.sizes.whole.tensors
    assert cli("job=plan", f"model.path={packed(form)}").exit == 0


def quantised(checkpoint: Checkpoint) -> list[Quantised]:
    """Return the packed weights of a checkpoint with places for their values."""
    read = Filler(checkpoint.files, hashing=False).read
    return [
        Quantised(checkpoint.value(name), list(pieces_of(each, read)), each.layout.turned)
        for name, each in checkpoint.unpacked.packed.items()
    ]


# Mistakes that change nothing of what is packed so: no zero points, no act-order, one scale.
NONE = {
    "int4": {"packed_zero_point_added", "packed_order_ignored"},
    "int4_zeros": {"packed_order_ignored"},
    "awq": {"packed_order_ignored"},
    "int8": {
        *("packed_zero_point_added", "packed_order_ignored", "packed_group_size"),
        "packed_scale_axis",
    },
    "fp8_by_weight": {"fp8_scale_of_another_block"},
}


@pytest.mark.parametrize("form", FORMATS)
def test_each_mistake_of_unpacking_gives_values_of_its_own(
    packed: Callable[[str], Path], form: str
) -> None:
    checkpoint = Checkpoint(packed(form))
    (kind,) = checkpoint.unpacked.kinds
    faults = [each for each in hypotheses(torch.nn.Module()) if kind in each.quantised]
    assert len(faults) >= 3
    found: dict[str, torch.Tensor] = {}
    for fault in faults:
        weights = quantised(checkpoint)
        right = [each.value.clone() for each in weights]
        fault.plant(torch.nn.Module(), Surgery(0, None, quantised=lambda held=weights: held))
        same = all(torch.equal(a, b.value) for a, b in zip(right, weights, strict=True))
        assert same == (fault.id in NONE.get(form, ())), fault.id
        if not same:
            found[fault.id] = torch.cat([each.value.flatten() for each in weights])
    for name, values in found.items():
        alike = [n for n, each in found.items() if torch.equal(each, values)]
        assert alike == [name]


def test_sound_pieces_give_the_values_themselves(packed: Callable[[str], Path]) -> None:
    """The planting is not what makes the difference."""
    for each in quantised(Checkpoint(packed("mxfp4"))):
        right = each.value.clone()
        each.put(Pieces.values)
        assert torch.equal(each.value, right)


@pytest.mark.parametrize(
    ("form", "mistake", "says"),
    [
        ("awq", "packed_nibble_order", "in the wrong order"),
        ("gptq", "packed_zero_point_less_one", "the zero points were off by one"),
        ("int4", "packed_scale_of_neighbour", "the scale of its neighbour"),
        ("nvfp4", "packed_overall_twice", "the whole weight was applied twice"),
        ("mxfp4", "packed_nibble_order", "in the wrong order"),
    ],
)
def test_a_right_port_passes_and_a_mistake_is_named(
    packed: Callable[[str], Path], tmp_path: Path, cli: Cli, form: str, mistake: str, says: str
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    store = f"tracking.folder={tmp_path / 'runs'}"
    made = (
        *(store, f"model.path={packed(form)}", "device_map=cpu", "backend=gpu"),
        *("inputs=tokens", f"inputs.file={tmp_path / 'ids.json'}", "capture=components"),
    )
    golden = cli(*made, "name=golden", "reference.chained=false")
    assert golden.exit == 0, golden.err
    assert ("what is multiplied is not quantised" in golden.out) == (form == "nvfp4")
    wrong = ("port=fault", f"port.name={mistake}", "port.layers=[1]")
    for name, words in (("right", ()), ("wrong", wrong)):
        assert cli(*made, f"name={name}", "kind=candidate", *words).exit == 0
    right = cli("job=compare", store, "golden=golden", "candidate=right")
    assert right.exit == 0 and "PASS" in right.out
    ended = cli("job=compare", store, "golden=golden", "candidate=wrong")
    assert ended.exit == 1 and "FAIL at layers.1" in ended.out
    cause = next(line for line in ended.out.splitlines() if line.startswith("cause"))
    assert "shown" in cause and says in cause


def test_the_table_of_mistakes_holds_each_that_a_format_can_have(tmp_path: Path) -> None:
    """The page's table; its first cell is planted, and named from weights and from tensors."""
    page = packing_mistakes.PAGE.read_text()
    stated = set()
    for line in page.partition(packing_mistakes.BEGIN)[2].splitlines():
        found = re.match(r"\| `(\w+)` \| .* \| (.*) \|$", line)
        stated |= {(found[1], form) for form in found[2].split(", ")} if found else set()
    due = set()
    for form in (*FORMATS, "fp8"):
        base = tmp_path / form
        base.mkdir()
        checkpoint = Checkpoint(packing_mistakes.checkpoints(form, base)[1])
        (kind,) = checkpoint.unpacked.kinds
        values = {name: checkpoint.value(name) for name in checkpoint.unpacked.packed}
        for fault in packing_mistakes.mistakes(kind):
            wrong = packing_mistakes.wrong_values(checkpoint, fault)
            if not all(torch.equal(each, values[name]) for name, each in wrong.items()):
                due.add((fault.id, form))
    assert stated == due
    assert [known_fault(name).id for name, _ in sorted(due)] == [name for name, _ in sorted(due)]
    for unknown in ("packed_scale_axes", "self_attn", "head_dim"):
        with pytest.raises(UserError, match=f"There is no fault '{unknown}'"):
            known_fault(unknown)
    (tmp_path / "one").mkdir()
    first = next(packing_mistakes.cells("mxfp4", tmp_path / "one"))
    assert first == ("packed_nibble_order", packing_mistakes.NAMED, packing_mistakes.NAMED)
