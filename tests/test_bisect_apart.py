"""Keys that a process can hold only once: each trial of a bisection in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import composing
import pytest
from conftest import SMALL, Ended

from layerparity.ground.errors import UserError
from layerparity.making import own_process
from layerparity.record.folder import RunFolder

Cli = Callable[..., Ended]
CPU = ("backend=gpu", "device_map=cpu")


def test_keys_that_a_process_holds_once_are_tried_in_processes_of_their_own(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch_xla", reason="pip install torch==2.9.1 torch_xla==2.9.0")
    # What another test of this process may have told XLA is no wish of this command's.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    # Processes of their own compose what the files say.
    monkeypatch.setattr(composing, "default_model", None)
    folder = f"tracking.folder={tmp_path / 'runs'}"
    part = (SMALL, "scope=single", "layer=1")
    whole = ("scope=range", "start=0", "end=1", "name=the-golden")
    assert cli(*CPU, SMALL, folder, *whole).exit == 0
    ended = cli(
        *("job=bisect", "backend=neuron", "golden=the-golden", "tolerance=fixed", folder, *part),
        "job.bad={backend.excess_precision:true}",
    )
    # Both configurations ran, and both are right.
    assert ended.exit == 2
    assert "job.bad does not fail (pass)" in ended.err
    manifests = [RunFolder(path.parent).read_manifest() for path in tmp_path.rglob("manifest.json")]
    flags = {each.numerics["XLA_FLAGS"] for each in manifests if each.kind == "candidate"}
    assert len(flags) == 2, flags


def test_a_run_apart_says_why_it_cannot_run(tmp_path: Path) -> None:
    keys = {"backend": "gpu", "device_map": "cpu", "scope": "single", "layer": 99}
    with pytest.raises(UserError, match="layer=99"):
        own_process.make({**keys, "tracking.folder": str(tmp_path)})


def test_a_run_apart_keeps_its_progress_in_its_own_log(tmp_path: Path) -> None:
    asked = {"backend": "gpu", "device_map": "cpu", "kind": "candidate", "inputs": "prompt"}
    own_process.make({**asked, "scope": "single", "layer": 0, "tracking.folder": str(tmp_path)})
    (log,) = tmp_path.rglob("log.txt")
    assert "blocks: 2 of 2 layers.0\n" in log.read_text()


def test_a_run_apart_ends_with_the_command(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    told.write_text("{}")
    children = []
    with (
        (tmp_path / "errors").open("w+") as errors,
        pytest.raises(KeyboardInterrupt),
        own_process._child(told, errors) as child,
    ):
        assert child.poll() is None
        children.append(child)
        raise KeyboardInterrupt
    assert children[0].returncode not in (None, 0)
