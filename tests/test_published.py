"""Checkpoints as vendors published them: planned to the parameter, read to each tensor's name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from itertools import takewhile
from math import prod
from pathlib import Path

import published
import pytest
import torch
from conftest import Ended
from published import PAGE, Published, planned, row, written

from layerparity.model.architecture import read_config
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.header import read_header
from layerparity.model.skeleton import Skeleton
from layerparity.model.stage_names import stage_of_name

EVERY = {each.name: each for each in published.published()}
ROWS = PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", [n for n, each in EVERY.items() if each.parameters])
def test_as_many_parameters_are_planned_as_its_hub_counts(name: str, tmp_path: Path) -> None:
    each = EVERY[name]
    checkpoint = Checkpoint(each.write(tmp_path / "model"))
    model = planned(checkpoint)
    assert model.parameters == each.parameters
    assert row(each, checkpoint, model) in ROWS


@pytest.mark.parametrize("name", [n for n, each in EVERY.items() if each.tensors])
def test_every_tensor_of_the_text_model_is_found_in_its_shape(name: str, tmp_path: Path) -> None:
    each = EVERY[name]
    checkpoint = Checkpoint(each.write(tmp_path / "model"))
    whole = read_header(checkpoint.folder / "model.safetensors").tensors
    assert sum(stored.bytes for stored in whole) == each.bytes
    assert not checkpoint.unpacked.faults
    model = planned(checkpoint)
    skeleton = Skeleton(read_config(checkpoint.config), torch.bfloat16, None, None)
    used = {each for stage in model.stages for each in skeleton.sources(checkpoint, stage)}
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items()}
    weights = [each for stage in model.weights.values() for each in stage if not each.tied]
    assert sum(prod(shapes[each]) for each in used) == sum(each.numel for each in weights)
    # What is left is of blocks that predict further tokens, behind the last.
    blocks = checkpoint.config["num_hidden_layers"]
    left = {stage_of_name(name) for name in shapes.keys() - used}
    assert left <= {f"layers.{blocks}"}, left
    assert row(each, checkpoint, model) in ROWS


def test_the_page_has_a_row_of_each() -> None:
    first = ROWS.index(published.HEAD.splitlines()[0]) + 2
    table = takewhile(lambda line: line.startswith("|"), ROWS[first:])
    assert [line.split("|")[1].strip() for line in table] == [*EVERY]
    with pytest.raises(ValueError, match="the page has no table"):
        written("a page", [])


def test_its_command_prints_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published, "published", lambda: [EVERY["openai/gpt-oss-20b"]])
    monkeypatch.setattr(sys, "argv", ["published.py"])
    # What a program silences for itself, other tests in this process want to hear.
    monkeypatch.setattr(logging, "disable", lambda level: None)
    assert published.main() == 0
    assert capsys.readouterr().out.strip() in ROWS


@pytest.mark.parametrize("name", [n for n, each in EVERY.items() if each.modelopt])
def test_what_modelopt_says_beside_config_json_counts(name: str, tmp_path: Path) -> None:
    each: Published = EVERY[name]
    checkpoint = Checkpoint(each.write(tmp_path / "model"))
    assert checkpoint.config["quantization_config"]["quant_method"] == "modelopt"
    plain = Published(each.name, each.config)
    assert Checkpoint(plain.write(tmp_path / "plain")).config_digest == checkpoint.config_digest


def test_a_plan_says_what_is_stored(tmp_path: Path, cli: Callable[..., Ended]) -> None:
    folder = EVERY["openai/gpt-oss-20b"].write(tmp_path / "model")
    ended = cli("job=plan", f"model.path={folder}", "plan.devices=8xH200")
    assert ended.exit == 0, ended.err
    assert "stored as 13,761,264,768 bytes (13.76 GB): MXFP4 10.15 GB, BF16 3.61 GB" in ended.out


def test_kimi_k2_is_run_as_the_model_that_it_is(tmp_path: Path, cli: Callable[..., Ended]) -> None:
    folder = EVERY["moonshotai/Kimi-K2-Instruct"].write(tmp_path / "model")
    ended = cli(
        "job=plan", f"model.path={folder}", "plan.devices=16xH200", "scope=single", "layer=0"
    )
    assert ended.exit == 0, ended.err
    assert "kimi_k2 is run as deepseek_v3" in ended.out
