"""Whatever names a model names its folder, and a run's name says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.ground.resources import shipped
from layerparity.settings.model import ModelSettings


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


def test_an_option_of_ones_own_without_a_name_is_refused(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("path: nowhere\n")
    ended = cli("--config-dir=own", "model=mine", "scope=single", "layer=0")
    assert ended.exit == 2
    assert "The option of model= has no name: add 'name: NAME' to it." in ended.err


def test_a_folder_is_asked_the_same_however_it_is_named(
    run: Callable[..., Ended], shorter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shorter.parent)
    words = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0")
    ways = ("model=half-context", "model.path=half-context")
    ways += ("model=checkpoint model.path=half-context",)
    said = [run(*words, *way.split()).out for way in ways]
    fed = {line for out in said for line in out.splitlines() if line.startswith("fed prompt")}
    assert len(fed) == 1
    # The words that the shipped model is asked are its own.
    assert "Two machines compare" not in fed.pop()
    assert all("golden-half-context-single-0-float32-cpu  " in out for out in said)
    assert all("next:" in out and " model.path=half-context" in out for out in said)
    assert not any("model=checkpoint" in out for out in said)
    # The golden of one way fits the others, and a prompt that is typed is asked.
    again = run(*words, ways[0], "kind=candidate", "inputs=golden")
    assert "fed the inputs recorded by golden run" in again.out
    asked = run(*words, ways[1], "model.prompt=Hello")
    assert "fed prompt 'Hello'" in asked.out
