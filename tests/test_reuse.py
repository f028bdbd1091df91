"""reuse=true: only what is still there, and still of these weights, is taken again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended
from safetensors.torch import load_file, save_file

from layerparity.ground.resources import shipped

Cli = Callable[..., Ended]
TINY = shipped("checkpoints") / "tiny_minimax_m2"
ONE = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0", "inputs=prompt", "reuse=true")


def newest(folder: Path) -> Path:
    return max(folder.rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def without_a_site(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop("layers.0:out")
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "harm", "says"),
    [
        ("tensors/layers.0.safetensors", Path.unlink, "layers.0.safetensors is gone"),
        ("tensors/layers.0.safetensors", cut, "it is cut off or damaged"),
        ("tensors/layers.0.safetensors", without_a_site, "does not hold layers.0:out"),
        ("inputs.safetensors", Path.unlink, "inputs.safetensors is gone"),
        ("manifest.json", Path.unlink, "No manifest.json"),
        ("manifest.json", cut, "is damaged"),
        ("", shutil.rmtree, "are gone from"),
    ],
)
def test_what_is_damaged_is_made_again(
    run: Cli, store: Path, file: str, harm: Callable[[Path], None], says: str
) -> None:
    assert run(*ONE).exit == 0
    folder = newest(store)
    again = run(*ONE)
    assert "Reusing run" in again.out, again.err
    harm(folder / file)
    ended = run(*ONE)
    assert ended.exit == 0, ended.err
    assert "Reusing" not in ended.out
    assert "is not reused: " in ended.out
    assert says in ended.out
    assert "Reusing run" in run(*ONE).out


def test_weights_that_keep_size_and_date_are_not_taken_for_the_same(
    cli: Cli, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(TINY, tmp_path / "copy"))
    words = (*ONE, "model=checkpoint", f"model.path={copy}")
    assert cli(*words).exit == 0
    assert "Reusing" in cli(*words).out
    path = copy / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\1\0\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    ended = cli(*words)
    assert ended.exit == 0, ended.err
    assert "Reusing" not in ended.out


PORT = """
import importlib, os
from pathlib import Path
from layerparity.ports.known.hf import HfPort
from leaning_reads import scale

class Port(HfPort):
    def load(self, stage):
        importlib.import_module("leaning_kernels.fast")
        scale(Path(__file__).with_name("scale.txt"), os.environ.get("LEANING_SCALE", "1"))
        return super().load(stage)
"""
READS = """
def scale(path, times):
    return float(path.read_text()) * float(times)
"""


def test_a_port_that_leans_on_something_else_by_now_is_run_again(tmp_path: Path) -> None:
    files = {
        "leaning.py": PORT,
        "scale.txt": "1",
        "elsewhere/leaning_reads.py": READS,
        "elsewhere/leaning_kernels/fast.py": "",
    }
    (tmp_path / "elsewhere/leaning_kernels").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path / "elsewhere"), *sys.path[1:]])
    words = [*ONE, "kind=candidate", "port._target_=leaning.Port"]

    def run() -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "layerparity", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert "Reusing" not in run()
    said = run()
    assert "Reusing run" in said
    assert re.search(
        r"^What its port loaded is as it was: modules \d+, files \d+, libr", said, re.M
    )
    assert "Not seen: what compiled code opens" in said
    (tmp_path / "scale.txt").write_text("2")
    (tmp_path / "elsewhere/leaning_kernels/fast.py").write_text("# faster")
    said = run()
    assert "Reusing" not in said
    assert re.search(r"is not reused: of what its port loaded, .* has changed \(and 1 more\)", said)
