"""Stored names by stage, of architectures that call their stages as few others do."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerparity.model.checkpoint import Checkpoint
from layerparity.model.stage_names import StageNames
from layerparity.selftest.models import make_model


@pytest.mark.parametrize(
    ("family", "sizes", "block", "ends"),
    [
        ("gpt2", {}, "transformer.h.1.", {"transformer.wte.weight", "transformer.wpe.weight"}),
        ("gpt_neox", {}, "gpt_neox.layers.1.", {"gpt_neox.embed_in.weight"}),
        ("phi", {}, "model.layers.1.", {"model.embed_tokens.weight"}),
        ("llama", {}, "model.layers.1.", {"model.embed_tokens.weight"}),
    ],
)
def test_every_tensor_is_of_one_stage(
    family: str, sizes: dict[str, int], block: str, ends: set[str], tmp_path: Path
) -> None:
    checkpoint = Checkpoint(make_model(family, tmp_path, changes={"num_hidden_layers": 2, **sizes}))
    assert all(name.startswith(block) for name in checkpoint.of_stage("layers.1"))
    assert {*checkpoint.of_stage("embed_tokens")} == ends
    stages = ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    named = {name for stage in stages for name in checkpoint.of_stage(stage)}
    assert named == {*checkpoint.tensors}
    assert all(checkpoint.of_stage(stage) for stage in stages)


def test_a_head_under_a_name_of_long_ago_is_not_the_embedding(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_model("gpt_neox", tmp_path, changes={"num_hidden_layers": 1}))
    assert checkpoint.of_stage("lm_head") == ["embed_out.weight"]


def test_a_decoder_alone_is_found_without_its_models_name() -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}
    names = ["h.0.attn.c_attn.weight", "wte.weight", "wpe.weight", "ln_f.weight"]
    found = StageNames(names, config)
    assert found.of("layers.0") == names[:1]
    assert found.of("embed_tokens") == found.of("lm_head") == names[1:3]
    assert found.of("norm") == names[3:]


def test_of_a_model_that_transformers_has_not_only_usual_names_are_known() -> None:
    found = StageNames(["h.0.weight", "layers.0.weight"], {"model_type": "of_mine"})
    assert found.of("layers.0") == ["layers.0.weight"]
    assert found.of("norm") == []
