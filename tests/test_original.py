"""A golden that computes with what a quantised checkpoint was made from: model.original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from conftest import Ended
from gguf import GGMLQuantizationType
from gguf_files import write
from gguf_small import MAKE
from packed_small import packed_copy
from safetensors.torch import save_file

from layerparity.making.read_back import recorded
from layerparity.model.checkpoint import Checkpoint
from layerparity.numbers.floor import PUBLISHED
from layerparity.record.references import StoredReferences

Cli = Callable[..., Ended]
IDS = [[11 + 7 * n % 80 for n in range(24)]]


@pytest.fixture
def made(tmp_path: Path) -> tuple[str, ...]:
    """Return the words that runs share: a Qwen3-MoE packed in INT4 beside its original."""
    folders.qwen3_moe(tmp_path / "whole")
    packed_copy(tmp_path / "whole", tmp_path / "packed", "int4")
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    return (
        *("backend=gpu", "device_map=cpu"),
        *(f"tracking.folder={tmp_path}/runs", "capture=components", "dtype=bfloat16"),
    )


def words(folder: Path) -> tuple[str, ...]:
    fed = ("inputs=tokens", f"inputs.file={folder}/ids.json")
    return (f"model.path={folder}/packed", f"model.original={folder}/whole", *fed)


def test_it_computes_with_the_original_and_judges_what_is_more_than_quantising(
    made: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    generated = "generate.max_new_tokens=3"
    golden = cli(*made, *words(tmp_path), "name=golden", generated)
    assert golden.exit == 0, golden.err
    assert "quantising moved 39 by " in golden.out
    assert "model.original" not in golden.out.partition("next:")[2]
    fed = ("inputs=tokens", f"inputs.file={tmp_path}/ids.json")
    whole = cli(*made, f"model.path={tmp_path}/whole", *fed, "name=whole", generated)
    assert whole.exit == 0, whole.err
    own, its = (recorded(name, str(tmp_path / "runs")) for name in ("golden", "whole"))
    # The same numbers as a golden of the original, and the weights of what it will judge.
    assert {r.site: r.digest for r in own.manifest.records} == {
        r.site: r.digest for r in its.manifest.records
    }
    packed, plain = (Checkpoint(tmp_path / each) for each in ("packed", "whole"))
    prints = own.run.files.read_effective_weights()
    for held in (each for stage in prints.values() for each in stage.items()):
        name, seen = held
        before, after = (each.value(name).float() for each in (plain, packed))
        moved = float((after - before).norm() / before.norm())
        assert seen.moved == pytest.approx(moved, rel=1e-5, abs=1e-12), name
        assert (seen.moved > 0) == (name in packed.unpacked.packed)
    stored = StoredReferences(own.run.files, own.manifest.reference)
    floors = [stored.floor(each, "bfloat16") for each in stored.entries()]
    assert all(each is not None and PUBLISHED in each.ways for each in floors) and floors

    wrong = ("port=fault", "port.name=qk_norm_skipped", "port.layers=[1]")
    candidate = (
        *made,
        f"model.path={tmp_path}/packed",
        "inputs=golden",
        "golden=golden",
        generated,
    )
    for name, more in (("right", ()), ("wrong", wrong)):
        assert cli(*candidate, "kind=candidate", f"name={name}", *more).exit == 0
    store = f"tracking.folder={tmp_path}/runs"
    right = cli("job=compare", store, "golden=golden", "candidate=right")
    assert right.exit == 0 and "PASS" in right.out, right.out
    assert "quantising alone moved them by 9." in " ".join(right.out.split())
    assert "is noisier than" not in right.out
    ended = cli("job=compare", store, "golden=golden", "candidate=wrong")
    assert ended.exit == 1 and "FAIL at layers.1.self_attn" in ended.out
    cause = next(line for line in ended.out.splitlines() if line.startswith("cause"))
    assert "shown" in cause and "the norm is left out" in cause


def test_streamed_it_is_the_same(made: tuple[str, ...], tmp_path: Path, cli: Cli) -> None:
    for name in ("cpu", "stream"):
        ended = cli(*made, *words(tmp_path), f"name={name}", f"device_map={name}")
        assert ended.exit == 0, ended.err
    one, other = (recorded(name, str(tmp_path / "runs")) for name in ("cpu", "stream"))
    assert one.manifest.weights == other.manifest.weights
    prints = [each.run.files.read_effective_weights() for each in (one, other)]
    assert prints[0] == prints[1]
    assert one.tensor("layers.2:out").equal(other.tensor("layers.2:out"))


def test_a_quantised_embedding_is_the_same_on_both_sides(tmp_path: Path, cli: Cli) -> None:
    """A GGUF file packs it, and a copy has no floor: made by another quantiser than ours."""
    whole = MAKE["qwen3"](tmp_path / "whole")
    (tmp_path / "gguf").mkdir()
    file = write(whole, tmp_path / "gguf/model.gguf", GGMLQuantizationType.Q8_0)
    shared = ("backend=gpu", "device_map=cpu", "dtype=bfloat16", f"model.path={file}")
    store = f"tracking.folder={tmp_path}/runs"
    made = (*shared, store, f"model.original={whole}", "inputs=random", "seq_len=16", "name=golden")
    assert cli(*made).exit == 0
    fed = (*shared, store, "kind=candidate", "inputs=golden", "golden=golden", "name=right")
    assert cli(*fed).exit == 0
    ended = cli("job=compare", store, "golden=golden", "candidate=right")
    assert ended.exit == 0 and "PASS" in ended.out, ended.out


def test_a_dry_run_says_both_and_a_quantised_original_is_said(
    made: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    dry = cli(*made, *words(tmp_path), "dry_run=true")
    assert dry.exit == 0, dry.err
    said = next(line for line in dry.out.splitlines() if line.startswith("reads"))
    assert f"files in {tmp_path}/whole and " in said and f"files in {tmp_path}/packed" in said
    packed_copy(tmp_path / "whole", tmp_path / "fp8", "fp8_by_row")
    words_of = [word.replace("/whole", "/fp8") for word in words(tmp_path)]
    dry = cli(*made, *words_of, "dry_run=true")
    assert dry.exit == 0 and "is quantised, too" in dry.out


def lora(folder: Path) -> Path:
    """Write a LoRA of one plain weight."""
    (folder / "lora").mkdir()
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["gate"]}
    (folder / "lora/adapter_config.json").write_text(json.dumps(said))
    gate = Checkpoint(folder / "whole").tensors["model.layers.0.mlp.gate.weight"]
    rows, columns = gate.shape
    parts = {"A": torch.ones(2, columns), "B": torch.ones(rows, 2)}
    name = "base_model.model.model.layers.0.mlp.gate.lora_{}.weight"
    tensors = {name.format(which): part for which, part in parts.items()}
    save_file(tensors, folder / "lora/adapter_model.safetensors")
    return folder / "lora"


def test_what_is_no_original_is_refused(made: tuple[str, ...], tmp_path: Path, cli: Cli) -> None:
    folders.llama(tmp_path / "llama")
    whole, packed = f"{tmp_path}/whole", f"{tmp_path}/packed"
    adapter = f"model.adapter={lora(tmp_path)}"
    for asked, said in {
        (f"model.path={packed}", f"model.original={whole}", "kind=candidate"): "is what a golden",
        (f"model.path={whole}", f"model.original={whole}"): "is not quantised",
        (f"model.path={packed}", f"model.original={tmp_path}/llama"): "is of another model than",
        (f"model.path={packed}", f"model.original={whole}", "reference.make=false"): "noise floors",
        (f"model.path={packed}", f"model.original={tmp_path}/none"): "cannot be opened: No checkp",
        (f"model.path={packed}", f"model.original={packed}"): "is model.path itself",
        (f"model.path={packed}", f"model.original={whole}", adapter): "has no adapter",
        (f"model.path={packed}", f"model.original={whole}", "job=plan"): "leave it out here",
        (f"model.path={packed}", f"model.original={whole}", "job=invariance"): "leave it out here",
    }.items():
        ended = cli(*made, *asked)
        assert ended.exit == 2 and said in ended.err, ended.err
