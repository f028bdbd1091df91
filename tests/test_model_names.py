"""Whatever names a model names its folder, and a run's name says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.ground.resources import shipped
from layerparity.settings.config import ModelSettings


@pytest.mark.parametrize(
    ("path", "label"),
    [
        (None, "minimax_m2"),
        ("/data/MiniMax-M2", "MiniMax-M2"),
        ("/data/MiniMax-M2/", "MiniMax-M2"),
        ("/c/hub/models--MiniMaxAI--MiniMax-M2/snapshots/0123abc", "MiniMaxAI/MiniMax-M2"),
        ("/", "minimax_m2"),
    ],
)
def test_a_model_is_called_by_its_folder(path: str | None, label: str) -> None:
    assert ModelSettings(name="minimax_m2", path=path).label == label


def test_a_folder_that_is_here_gives_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ModelSettings(name="checkpoint", path=".").label == "here"


@pytest.fixture
def shorter(tmp_path: Path) -> Path:
    """The shipped checkpoint, another model in one size of its configuration."""
    folder = tmp_path / "half-context"
    shutil.copytree(shipped("checkpoints") / "tiny_minimax_m2", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] //= 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_golden_of_another_model_is_refused_with_both_names(
    run: Callable[..., Ended], shorter: Path
) -> None:
    words = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0")
    name = "golden-tiny_minimax_m2-single-0-float32-cpu"
    assert f"{name}  " in run(*words).out
    other = (*words, "model=checkpoint", f"model.path={shorter}", "inputs=golden")
    ended = run(*other, f"golden={name}")
    assert ended.exit == 2
    assert "of another model: tiny_minimax_m2, and this run is of half-context" in ended.err
    assert "(both minimax_m2, with other sizes)" in ended.err
    assert "other weights" not in ended.out + ended.err
    own = run(*words, "model=checkpoint", f"model.path={shorter}")
    assert "run of half-context, " in own.out
    assert "golden-half-context-single-0-float32-cpu  " in own.out
