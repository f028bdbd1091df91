"""Fixtures: small checkpoints, and the command line run inside this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# accelerate imports torch_xla wherever it is installed; only the neuron backend wants it.
os.environ["USE_TORCH_XLA"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import folders

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a family's small checkpoint, made once."""
    base = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        folder = base / family
        return folder if folder.is_dir() else folders.FAMILIES[family](folder)

    return make


@dataclass
class Ended:
    """How a command ended and what it said."""

    exit: int
    out: str
    err: str


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Run a command line in this process, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    # A port of the user's own is looked for in the folder the command runs in, and only there.
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Ended:
        from hydra.core.global_hydra import GlobalHydra

        from layerparity.cli.door import main

        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        GlobalHydra.instance().clear()
        capsys.readouterr()
        code = int(main())
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of a file's tests."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def run(cli: Callable[..., Ended], store: Path) -> Callable[..., Ended]:
    """The command line over a store with one full golden run of every component, ``the-golden``."""
    folder = f"tracking.folder={store}"
    if not (store / "mlflow.db").exists():
        golden = ("capture=components", "generate.max_new_tokens=6", "name=the-golden")
        ended = cli("backend=gpu", "device_map=cpu", folder, *golden)
        assert ended.exit == 0, ended.err
    return lambda *arguments: cli(folder, *arguments)
