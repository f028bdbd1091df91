"""litgpt, really run: three lines record it in its own process; the folder is read as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from real_engines import FAULTS, IDS, checkpoint, judged
from safetensors.torch import load_file

from layerparity.record.verdict import Outcome
from layerparity.recording import recording

Cli = Callable[..., Ended]


def loaded(folder: Path) -> GPT:
    """Return litgpt's model with a checkpoint's weights, as its own converter places them."""
    values = json.loads((folder / "config.json").read_text())
    config = Config(
        name="small",
        block_size=values["max_position_embeddings"],
        padded_vocab_size=values["vocab_size"],
        n_layer=values["num_hidden_layers"],
        n_head=values["num_attention_heads"],
        n_query_groups=values["num_key_value_heads"],
        n_embd=values["hidden_size"],
        head_size=values["head_dim"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=values["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=values["intermediate_size"],
        rope_base=int(values["rope_parameters"]["rope_theta"]),
    )
    weights = load_file(folder / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    placed: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, placed, weights)
    model = GPT(config)
    model.load_state_dict(placed, strict=True)
    return model


def recorded(model: GPT, folder: Path) -> Path:
    with torch.no_grad(), recording(model, to=folder):
        model(IDS)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_one_passes(cli: Cli, tmp_path: Path, dtype: torch.dtype) -> None:
    model = loaded(checkpoint()).to(dtype)
    verdict, said = judged(cli, recorded(model, tmp_path / "folder"))
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.whole.outcome is Outcome.PASS, said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(cli: Cli, tmp_path: Path, fault: str) -> None:
    verdict, said = judged(cli, recorded(loaded(checkpoint(fault)), tmp_path / "folder"))
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith(FAULTS[fault][1]), said
