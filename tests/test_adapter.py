"""LoRA adapters, as PEFT writes them: merged as PEFT merges them, judged, and named when lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from conftest import Ended
from safetensors.torch import load_file, save_file
from test_packing import IDS, quantised

from layerparity.ground.errors import UserError
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.hypotheses import hypotheses
from layerparity.model.adapter import CONFIG, WEIGHTS
from layerparity.model.checkpoint import INDEX, Checkpoint
from layerparity.numbers.pieces import LORA
from layerparity.recording import recording

Cli = Callable[..., Ended]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 24, "target_modules": "all-linear"},
    "rslora": {"r": 8, "lora_alpha": 24, "target_modules": ["q_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 32},
    },
    # PEFT keeps the head as it was beside what it adds to it.
    "head": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    "whole": {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.llama(tmp_path_factory.mktemp("adapted") / "llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def made(base: Path) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that gives an adapter's folder, and that of the model PEFT merged it to."""

    def make(kind: str) -> tuple[Path, Path]:
        adapter, merged = base.parent / kind, base.parent / f"{kind}-merged"
        if not merged.is_dir():
            from peft import LoraConfig, get_peft_model
            from transformers import AutoModelForCausalLM

            torch.manual_seed(1)
            model = get_peft_model(
                AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
                LoraConfig(task_type="CAUSAL_LM", **SETTINGS[kind]),
            )
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.05 * torch.randn(parameter.shape)
            model.save_pretrained(adapter)
            model.merge_and_unload().save_pretrained(merged)
        return adapter, merged

    return make


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_weights_are_what_peft_merges(
    base: Path, made: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    adapter, merged = made(kind)
    own, right, plain = Checkpoint(base, adapter=adapter), Checkpoint(merged), Checkpoint(base)
    assert own.tensors.keys() == right.tensors.keys()
    changed = set()
    for name in own.tensors:
        value = own.value(name, torch.float32)
        torch.testing.assert_close(value, right.value(name), rtol=1e-6, atol=1e-7)
        if not torch.equal(value, plain.value(name)):
            changed.add(name.removesuffix(".weight").rpartition(".")[2])
    assert (
        changed
        == {
            "plain": {f"{each}_proj" for each in (*"qkvo", "gate", "up", "down")},
            "rslora": {"q_proj"},
            "patterns": {"q_proj", "down_proj"},
            "head": {"q_proj", "lm_head"},
            "whole": {"v_proj", "lm_head"},
        }[kind]
    )


def test_a_wrapped_model_s_adapter_has_its_names(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter, _ = made("rslora")
    whole, other = tmp_path / "whole", tmp_path / "adapter"
    whole.mkdir()
    text = json.loads((base / "config.json").read_text())
    wrapped = {"model_type": "llava", "text_config": text}
    (whole / "config.json").write_text(json.dumps(wrapped))
    inside = "model.language_model."
    tensors = load_file(base / "model.safetensors")
    named = {f"{inside}{n.removeprefix('model.')}": each for n, each in tensors.items()}
    save_file(named, whole / "model.safetensors")
    shutil.copytree(adapter, other)
    pairs = load_file(adapter / WEIGHTS)
    save_file(
        {n.replace("model.layers", f"{inside}layers"): each for n, each in pairs.items()},
        other / WEIGHTS,
    )
    name = "model.layers.1.self_attn.q_proj.weight"
    held, right = (
        Checkpoint(folder, adapter=folder_of_it).value(name)
        for folder, folder_of_it in ((whole, other), (base, adapter))
    )
    assert torch.equal(held, right)


def test_each_mistake_gives_weights_of_its_own(
    base: Path, made: Callable[[str], tuple[Path, Path]]
) -> None:
    checkpoint = Checkpoint(base, adapter=made("plain")[0])
    faults = [each for each in hypotheses(torch.nn.Module()) if LORA in each.quantised]
    found: dict[str, torch.Tensor] = {}
    for fault in faults:
        weights = quantised(checkpoint)
        found["sound"] = torch.cat([each.value.flatten() for each in weights])
        fault.plant(torch.nn.Module(), Surgery(0, None, quantised=lambda held=weights: held))
        found[fault.id] = torch.cat([each.value.flatten() for each in weights])
    assert len(found) == 6
    for name, values in found.items():
        assert [n for n, each in found.items() if torch.allclose(each, values)] == [name]


def peft_of(base: Path, adapter: Path) -> Any:
    """Return PEFT's model of a checkpoint with an adapter, which it adds in each forward."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), adapter
    )


def test_what_peft_computes_passes_and_what_it_does_not_add_is_named(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path, cli: Cli
) -> None:
    adapter, _ = made("plain")
    model = peft_of(base, adapter)
    ids = torch.tensor(IDS)
    for name in ("right", "lost"):
        with recording(model.base_model.model, to=tmp_path / name, sites="components"):
            if name == "right":
                model(ids)
            else:
                with model.disable_adapter():
                    model(ids)
    own = ("job=compare", "job.own_inputs=true", "device_map=cpu", f"model.path={base}")
    judge = (*own, f"model.adapter={adapter}", f"tracking.folder={tmp_path / 'runs'}")
    right = cli(*judge, f"candidate={tmp_path / 'right'}")
    assert right.exit == 0 and "PASS" in right.out, right.out
    assert "plain (LoRA of rank 8) is merged into 21 weights" in right.out
    lost = cli(*judge, f"candidate={tmp_path / 'lost'}")
    assert lost.exit == 1 and "FAIL at layers.0.self_attn" in lost.out
    cause = next(each for each in lost.out.splitlines() if each.startswith("cause"))
    assert "shown" in cause and "the adapter was not added to the weights" in cause


def test_a_port_that_does_not_add_it_is_named_by_its_weights(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    store = f"tracking.folder={tmp_path / 'runs'}"
    words = (
        *(store, "device_map=cpu", f"model.path={base}", f"model.adapter={made('plain')[0]}"),
        *("inputs=tokens", f"inputs.file={tmp_path / 'ids.json'}", "capture=components"),
    )
    assert cli(*words, "backend=gpu", "name=golden", "reference.chained=false").exit == 0
    port = ("port=fault", "port.name=adapter_ignored", "port.layers=[1]")
    assert cli(*words, "backend=gpu", "kind=candidate", "name=wrong", *port).exit == 0
    ended = cli("job=compare", store, "golden=golden", "candidate=wrong")
    assert ended.exit == 1 and "FAIL at layers.1.self_attn.q_proj: weight changed" in ended.out
    cause = next(each for each in ended.out.splitlines() if each.startswith("cause"))
    assert "shown" in cause and "the adapter was not added to the weights" in cause


def test_a_run_is_that_of_its_adapter_and_of_its_settings(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path, cli: Cli
) -> None:
    other = tmp_path / "other"
    shutil.copytree(made("rslora")[0], other)
    words = (f"model.path={base}", "inputs=random", "reference.make=false", "reuse=true")
    here = (*words, "device_map=cpu", "backend=gpu", f"tracking.folder={tmp_path / 'runs'}")
    said = []
    for alpha in (None, 24, 24, 48):
        if alpha:
            settings = json.loads((other / CONFIG).read_text()) | {"lora_alpha": alpha}
            (other / CONFIG).write_text(json.dumps(settings))
        ended = cli(*here, *([f"model.adapter={other}"] if alpha else []))
        assert ended.exit == 0, ended.err
        said.append("Reusing run" in ended.out)
    assert said == [False, False, True, False]


@pytest.mark.parametrize("kind", ["plain", "whole"])
def test_a_conversion_writes_the_merged_weights(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path, cli: Cli, kind: str
) -> None:
    adapter, to = made(kind)[0], tmp_path / "written"
    ended = cli("job=convert", f"model.path={base}", f"model.adapter={adapter}", f"to={to}")
    assert ended.exit == 0, ended.err
    assert "with what the adapter adds" in ended.out
    # An index would tell where the rest is, and transformers looks at no index beside that file.
    assert [each.name for each in to.glob("*.safetensors")] == ["model.safetensors"]
    own, written = Checkpoint(base, adapter=adapter), Checkpoint(to)
    assert own.tensors.keys() == written.tensors.keys()
    for name in own.tensors:
        assert torch.equal(own.value(name, written.held_as(name)), written.value(name))


def test_a_conversion_of_other_settings_is_another(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path, cli: Cli
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(made("rslora")[0], adapter)
    words = ("job=convert", f"model.path={base}", f"model.adapter={adapter}", f"to={tmp_path}/w")
    assert cli(*words).exit == 0
    settings = json.loads((adapter / CONFIG).read_text()) | {"lora_alpha": 160}
    (adapter / CONFIG).write_text(json.dumps(settings))
    ended = cli(*words)
    assert ended.exit == 2 and "another config.json" in ended.err


def test_a_tied_head_and_its_embedding_are_not_changed_alone(
    tmp_path: Path, made: Callable[[str], tuple[Path, Path]]
) -> None:
    tied = folders.llama(tmp_path / "tied")
    with pytest.raises(UserError, match="the head may be the embedding"):
        _ = Checkpoint(tied, adapter=made("whole")[0]).tensors


def test_layers_that_are_not_here_are_not_changed(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    tensors = load_file(base / "model.safetensors")
    here = {name: each for name, each in tensors.items() if "layers.2" not in name}
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    save_file(here, tmp_path / "1.safetensors")
    files = {name: "1.safetensors" if name in here else "2.safetensors" for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    part = Checkpoint(tmp_path, ["layers.0"], adapter=made("plain")[0])
    assert len(part.unpacked.packed) == 14


def without(name: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], object]:
    return lambda _, tensors: tensors.pop(next(n for n in tensors if name in n))


def given(**settings: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], object]:
    return lambda config, _: config.update(settings)


def reshaped(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    name = next(n for n in tensors if "lora_A" in n)
    tensors[name] = tensors[name][:, :-1].contiguous()


def elsewhere(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "layers.1" in n]:
        tensors[name.replace("layers.1", "layers.9")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("lora_B"), "and not the two matrices of a LoRA"),
        (reshaped, "and the checkpoint [64, 64]"),
        (elsewhere, "layers.9.self_attn.q_proj.weight, which the checkpoint has not"),
        (given(lora_alpha=None), "has no alpha for model.layers.0.self_attn.q_proj"),
        (given(alpha_pattern={"(": 3}), "has no alpha for model.layers.0.self_attn.q_proj"),
        (given(use_dora=True), "use_dora is set: DoRA scales each row anew"),
        (given(peft_type="IA3"), "peft_type is IA3, and LoRA alone is read"),
        (given(init_lora_weights="pissa_niter_4"), "which changes the base weights"),
    ],
)
def test_what_is_no_sum_or_does_not_fit_is_refused(
    base: Path,
    made: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object],
    says: str,
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(made("rslora")[0], folder)
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError) as error:
        _ = Checkpoint(base, adapter=folder).tensors
    assert says in str(error.value)


def test_one_that_adds_zeros_is_said_so(
    base: Path, made: Callable[[str], tuple[Path, Path]], tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "fresh"
    shutil.copytree(made("rslora")[0], folder)
    tensors = load_file(folder / WEIGHTS)
    zeros = {n: each.zero_() if "lora_B" in n else each for n, each in tensors.items()}
    save_file(zeros, folder / WEIGHTS)
    words = (f"model.path={base}", f"model.adapter={folder}", "job=plan")
    ended = cli(*words)
    assert ended.exit == 0 and "fresh adds nothing: all of its lora_B are zero" in ended.out
    refused = cli(*words, "job=audit")
    assert refused.exit == 2 and "leave model.adapter out" in refused.err
    unfit = cli("job=plan", f"model.path={folders.llama(tmp_path / 'narrow', hidden_size=32)}",
                f"model.adapter={folder}")  # fmt: skip
    assert unfit.exit == 2 and "it was trained on" in unfit.err
    none = cli(f"model.path={base}", f"model.adapter={base}", "job=plan")
    assert none.exit == 2 and "it lacks adapter_config.json" in none.err
