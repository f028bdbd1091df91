"""The audit of checkpoints that are never run by stages: sound encoders, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerparity.checkpoint.audit import Audit, examine
from layerparity.model.checkpoint import Checkpoint

WEIGHTS = "model.safetensors"


def bert(kind: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        import transformers

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.BertConfig(**sizes, intermediate_size=128, vocab_size=300)
        getattr(transformers, kind)(config).to(torch.bfloat16).save_pretrained(folder)

    return save


def t5_encoder(folder: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=64, d_kv=16, num_layers=2, num_heads=4, d_ff=128, vocab_size=300)
    T5EncoderModel(config).to(torch.bfloat16).save_pretrained(folder)


ENCODERS = [bert("BertForMaskedLM"), bert("BertModel"), t5_encoder]


def audited(folder: Path) -> Audit:
    return examine(Checkpoint(folder), deep=True)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("save", ENCODERS)
def test_a_sound_encoder_is_sound(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    audit = audited(tmp_path)
    assert not audit.problems, [each.text for each in audit.problems]
    (note,) = [each for each in audit.findings if each.what == "not_by_stages"]
    assert note.note and "Names and shapes were held against" in note.text


def test_a_tied_weight_may_have_either_name(tmp_path: Path) -> None:
    t5_encoder(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")

    changed(tmp_path, rename)
    assert not audited(tmp_path).problems


@pytest.mark.parametrize("save", ENCODERS)
def test_what_is_wrong_with_an_encoder_is_named(
    tmp_path: Path, save: Callable[[Path], None]
) -> None:
    save(tmp_path)
    lost, cut = [name for name, value in load_file(tmp_path / WEIGHTS).items() if value.dim() > 1][
        :2
    ]

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["a.surprise.weight"] = tensors.pop(lost)
        tensors[cut] = tensors[cut][:-1].contiguous()

    changed(tmp_path, damage)
    found = {each.what: each.text for each in audited(tmp_path).problems}
    assert found.keys() == {"tensor_missing", "tensor_unexpected", "shape_wrong"}
    assert lost in found["tensor_missing"] and cut in found["shape_wrong"]
    assert "a.surprise.weight" in found["tensor_unexpected"]


def test_a_class_that_is_none_of_transformers_is_not_looked_for(tmp_path: Path) -> None:
    bert("BertModel")(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for named in (["MyOwnModel"], ["os"], [], None, "BertModel"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": named}))
        assert {each.what for each in audited(tmp_path).problems} == {"architecture_unknown"}
