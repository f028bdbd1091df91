"""A disk that takes no more, for real: the system refuses to let a file grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import small_disk
from conftest import ROOT
from stores import fresh_config

from layerparity.tracking.opening import open_store

# What is limited, the bytes that a file may have, and what is lost. The database, which is larger,
# is on another disk, as it were: it may grow again once the run has failed.
CASES = {
    "recorder": ("write_tensors", 20_000, "tensors/layers.0.safetensors"),
    "inputs": ("write_inputs", 100, "inputs.safetensors"),
    "config": ("write_config", 1_000, "config.yaml"),
    "manifest": ("write_manifest", 100, "manifest.json"),
}
PROGRAM = """
import resource, sys
sys.path.insert(0, {src!r})
from hydra.core.global_hydra import GlobalHydra
from layerparity.record.folder import RunFolder
from layerparity.cli.door import main

def limited(work, room):
    def inner(*arguments, **keys):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            return work(*arguments, **keys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return inner

for name, (method, room, _) in {cases!r}.items():
    whole = getattr(RunFolder, method)
    setattr(RunFolder, method, limited(whole, room))
    GlobalHydra.instance().clear()
    sys.argv = ["run.py", *{arguments!r}, f"name={{name}}"]
    print("ended with", int(main()), file=sys.stderr)
    setattr(RunFolder, method, whole)
"""


def test_a_command_that_fills_a_disk_is_one_line_and_succeeds_once_there_is_room(
    tmp_path: Path,
) -> None:
    """No store, a golden without room for its references, a comparison without room: 3 of 20."""
    endings = small_disk.trials((0.3, 0.56, 0.83), tmp_path)
    assert [each.fault for each in endings if each.fault] == []
    assert endings[0].exit == 2, "it never was full"
    assert "free some disk space" in endings[0].said[0]
    assert len(endings) == 3 * len(small_disk.COMMANDS)


def test_a_full_disk_fails_the_run_and_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    config = fresh_config(tmp_path / "runs")
    one = ["backend=gpu", "device_map=cpu", "scope=single", "layer=0", "inputs=prompt"]
    arguments = [*one, f"tracking.folder={config.folder}"]
    program = PROGRAM.format(src=str(ROOT / "src"), cases=CASES, arguments=arguments)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("layerparity: ")]
    assert len(said) == ended.stderr.count("ended with 2") == len(CASES), ended.stderr
    assert all("cannot be written" in line for line in said)
    assert all(line.endswith("free some disk space.") for line in said)
    runs = {run.name: run for run in open_store(config).runs()}
    for name, (*_, lost) in CASES.items():
        folder = runs[name].folder
        assert runs[name].status == "FAILED"
        assert not (folder / lost).exists()
        assert not (folder / "manifest.json").exists()
        assert list(folder.rglob("*.part")) == []
        for path in folder.rglob("*.json"):
            json.loads(path.read_text())
