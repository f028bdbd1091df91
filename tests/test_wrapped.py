"""Text models inside others: run, planned, converted and audited as they are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from safetensors.torch import load_file, save_file

from layerparity.anatomy.site import Site
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.wrapped import text_name
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
IDS = torch.randint(20, 250, (1, 24), generator=torch.Generator().manual_seed(1))
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
_QWEN = {"vision_config": {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# What the whole is called, its text model's values beside those above, and its other parts'.
WHOLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"sliding_window": 16, "query_pre_attn_scalar": 16},
        {"vision_config": _TOWER, "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        {"sliding_window": 16, "hidden_size_per_layer_input": 16, "global_head_dim": 16,
         "vocab_size_per_layer_input": 300},
        {"vision_config": None, "audio_config": None},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {"vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 16}},
    ),
    "llama4": (
        {"num_local_experts": 2, "intermediate_size_mlp": 96, "no_rope_layers": [1, 1]},
        {"vision_config": {**_TOWER, "vision_output_dim": 32, "projector_input_dim": 32,
                           "projector_output_dim": 32}},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _MROPE},
        {"vision_config": {**_QWEN_TOWER, "out_hidden_size": 64, "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl": ({"rope_parameters": _MROPE}, _QWEN),
    "qwen3_vl_moe": ({"rope_parameters": _MROPE, **_SMALL_EXPERTS}, _QWEN),
    "qwen3_5": (
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
         "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        {"vision_config": {**_QWEN_TOWER, "out_hidden_size": 64}},
    ),
    "kimi_k25": (
        {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4,
         "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
         "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
         "head_dim": 8, "tie_word_embeddings": False},
        {"vision_config": {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
         "projection_hidden_size": 32, "tie_word_embeddings": False},
    ),
}  # fmt: skip
# As its own code calls the text model, which transformers has by another name.
_CALLED = {"kimi_k25": "kimi_k2"}


def whole(kind: str, folder: Path, **changes: Any) -> tuple[Path, torch.Tensor]:
    """Write a small model of a kind as transformers does; return its logits of `IDS`, too."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, others = WHOLES[kind]
    config = AutoConfig.for_model(kind, text_config={**_TEXT, **text}, **others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    if kind in _CALLED:
        values = json.loads((folder / "config.json").read_text())
        values["text_config"]["model_type"] = _CALLED[kind]
        (folder / "config.json").write_text(json.dumps(values))
        # transformers 5.23 renames the text model's layers with the tower's; published are layers.
        named = load_file(folder / "model.safetensors")
        inside = "language_model.model."
        save_file(
            {n.replace(f"{inside}blocks", f"{inside}layers"): each for n, each in named.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return folder, logits


@pytest.mark.parametrize("kind", WHOLES)
def test_its_text_model_runs_as_it_is_published(cli: Cli, tmp_path: Path, kind: str) -> None:
    folder, logits = whole(kind, tmp_path / kind)
    (tmp_path / "ids.json").write_text(json.dumps(IDS.tolist()))
    of = ("model=checkpoint", f"model.path={folder}", "inputs=tokens")
    ids = f"inputs.file={tmp_path / 'ids.json'}"
    here = ("backend=gpu", "device_map=cpu", "scope=full", f"tracking.folder={tmp_path / 'runs'}")
    ended = cli(*here, *of, ids, "reference.make=false", "name=golden")
    assert ended.exit == 0, ended.err
    assert f"{kind} holds a text model (" in ended.out
    run = open_store(TrackingConfig(folder=str(tmp_path / "runs"))).find("golden")[0]
    (record,) = [r for r in run.read_manifest().records if r.site == Site("lm_head", "out")]
    found = run.files.read_tensor(record)
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-4)


def test_names_of_every_layout() -> None:
    same = "model.layers.1.mlp.up_proj.weight"
    for name in (
        "language_model.model.layers.1.mlp.up_proj.weight",
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.language_model.model.layers.1.mlp.up_proj.weight",
        same,
    ):
        assert text_name(name) == same
    assert text_name("language_model.lm_head.weight") == "lm_head.weight"
    for other in (
        "model.visual.blocks.0.norm1.weight",
        "vision_tower.layers.0.mlp.weight",
        "model.vision_tower.encoder.layers.0.norm.weight",
        "multi_modal_projector.weight",
    ):
        assert text_name(other) is None


def test_what_it_does_not_say_of_its_sizes_is_filled_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34},
                "quantization_config": {"quant_method": "fp8"},
                "tie_word_embeddings": True,
            }
        )
    )
    config = Checkpoint(tmp_path).config
    assert (config["model_type"], config["num_attention_heads"], config["head_dim"]) == (
        "gemma3_text",
        8,
        256,
    )
    assert config["layer_types"].count("full_attention") == 5
    assert config["quantization_config"] == {"quant_method": "fp8"}


def test_it_is_compared_planned_audited_and_converted(cli: Cli, tmp_path: Path) -> None:
    folder, _ = whole("gemma3", tmp_path / "gemma3")
    of = ("model=checkpoint", f"model.path={folder}", f"tracking.folder={tmp_path / 'runs'}")
    (tmp_path / "ids.json").write_text(json.dumps(IDS.tolist()))
    ids = ("inputs=tokens", f"inputs.file={tmp_path / 'ids.json'}")
    here = ("backend=gpu", "device_map=cpu", "scope=range", "start=0", "end=1")
    few = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
    assert cli(*here, *of, *ids, *few, "name=golden").exit == 0
    fault = ("kind=candidate", "port=fault", "port.name=qk_norm_skipped", "port.layers=[1]")
    assert cli(*here, *of, *fault, "golden=golden", "name=wrong").exit == 0
    ended = cli("job=compare", "golden=golden", "candidate=wrong", of[2])
    assert (ended.exit, "FAIL at layers.1.self_attn" in ended.out) == (1, True), ended.out
    ended = cli("job=plan", *of[:2], "backend=gpu", "plan.devices=1x80GB")
    assert ended.exit == 0, ended.out + ended.err
    assert "gemma3 holds a text model (gemma3_text) beside others" in ended.out
    ended = cli("job=audit", *of[:2])
    assert (ended.exit, "not_by_stages" in ended.out) == (0, False), ended.out
    # What is written is the text model alone, as transformers reads it.
    ended = cli("job=convert", *of[:2], "dtype=bfloat16", f"to={tmp_path / 'text'}")
    assert ended.exit == 0, ended.out + ended.err
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert written["model_type"] == "gemma3_text"
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report


def test_shards_of_other_parts_alone_need_not_be_here(tmp_path: Path) -> None:
    folder, _ = whole("qwen3_vl", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    text = {name: value for name, value in weights.items() if text_name(name) is not None}
    (folder / "model.safetensors").unlink()
    save_file(text, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    index = {name: f"model-0000{1 if name in text else 2}-of-00002.safetensors" for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = Checkpoint(folder)
    assert len(text) < len(weights)
    assert not checkpoint.missing and len(checkpoint.tensors) == len(text)
    name = "model.layers.1.self_attn.q_proj.weight"
    read = checkpoint.read([name])[0][name]
    assert torch.equal(read, text["model.language_model" + name.removeprefix("model")])
