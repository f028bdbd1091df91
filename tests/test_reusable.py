"""Which stored run is taken for a new one, what can go on, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from runs import make_run
from safetensors.torch import save_file

from layerparity.ground.errors import UserError
from layerparity.making import reuse
from layerparity.record.folder import INPUTS, MANIFEST
from layerparity.settings.config import Config
from layerparity.settings.tracking import SERVER, TrackingConfig

MARK = "f" * 40
Harm = Callable[[Path], object]


@pytest.mark.parametrize(
    ("config", "goes_on", "said"),
    [
        (Config(), True, ""),
        (Config(tracking=TrackingConfig(SERVER, "http://x")), False, "a server leaves no files"),
        (Config(tp_degree=2), False, r"tp_degree=2\) could not go on with the same bits"),
    ],
)
def test_what_cannot_go_on_is_not_noted_and_not_resumed(
    config: Config, goes_on: bool, said: str
) -> None:
    assert reuse.can_go_on(config) is goes_on
    config.resume = True
    if goes_on:
        assert reuse.can_go_on(config)
        return
    with pytest.raises(UserError, match=said):
        reuse.can_go_on(config)


def stored(folder: Path) -> Any:
    """Keep a run of two sites in a folder; return it as a store finds it."""
    tensors = {"layers.0:in": torch.zeros(1, 4, 8), "layers.0:out": torch.ones(1, 4, 8)}
    return make_run(folder, tensors, stages=("layers.0",), fingerprint=MARK)


def found(run: Any, fingerprint: str = MARK, name: str = "embedded") -> Any:
    config = SimpleNamespace(name=name)
    store: Any = SimpleNamespace(config=config, by_fingerprint=lambda mark: run)
    return reuse.reusable(store, fingerprint)


def test_a_whole_run_of_this_fingerprint_is_taken(tmp_path: Path) -> None:
    run = stored(tmp_path)
    assert found(run) is run
    assert found(None) is None


TENSOR = "tensors/layers.0.out.0.safetensors"
HARMS: dict[str, Harm] = {
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "no inputs": lambda folder: (folder / INPUTS).unlink(),
    "a lost file": lambda folder: (folder / TENSOR).unlink(),
    "a file cut off": lambda folder: (folder / TENSOR).write_bytes(
        (folder / TENSOR).read_bytes()[:-4]
    ),
    "another tensor": lambda folder: save_file({"layers.0:in": torch.ones(1)}, folder / TENSOR),
    "of another shape": lambda folder: save_file(
        {"layers.0:out": torch.ones(1, 3, 8)}, folder / TENSOR
    ),
}


@pytest.mark.parametrize("what", HARMS)
def test_what_is_not_whole_is_made_again(tmp_path: Path, capsys: Any, what: str) -> None:
    run = stored(tmp_path)
    HARMS[what](tmp_path)
    assert found(run) is None
    assert "is not reused: " in capsys.readouterr().out


def test_a_manifest_of_another_run_is_not_taken_for_this_one(tmp_path: Path, capsys: Any) -> None:
    assert found(stored(tmp_path), "e" * 40) is None
    assert f"its {MANIFEST} is another run's" in capsys.readouterr().out


def test_of_a_servers_run_only_the_manifest_is_looked_at(tmp_path: Path) -> None:
    run = stored(tmp_path)
    (tmp_path / TENSOR).unlink()
    assert found(run, name=SERVER) is run


def test_two_do_not_resume_one_run_at_once(tmp_path: Path) -> None:
    store: Any = SimpleNamespace(config=SimpleNamespace(root=tmp_path))
    with reuse.alone(Config(resume=True), store, MARK):
        with (
            pytest.raises(UserError, match="Another command makes or resumes this very run"),
            reuse.alone(Config(resume=True), store, MARK),
        ):
            pass
        # Another run, and one that is made anew whatever there is, are nobody's business.
        with reuse.alone(Config(resume=True), store, "e" * 40):
            pass
        with reuse.alone(Config(), store, MARK):
            pass
    with reuse.alone(Config(resume=True), store, MARK):
        pass


def test_who_reuses_waits_for_the_one_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    store: Any = SimpleNamespace(config=SimpleNamespace(root=tmp_path))
    (tmp_path / "locks").mkdir()
    other, real = FileLock(tmp_path / "locks" / f"{MARK[:32]}.lock"), FileLock.acquire
    other.acquire()

    def acquire(self: FileLock, *arguments: Any, **more: Any) -> Any:
        if not more:
            # It would wait for ever: until it is asked so, the other one is at work.
            other.release()
        return real(self, *arguments, **more)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with reuse.alone(Config(reuse=True), store, MARK):
        assert not other.is_locked
    assert "it is waited for" in capsys.readouterr().out
