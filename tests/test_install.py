"""Installed as a wheel, and without optional packages: what works, and what says it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

OPTIONAL = (
    "torch_xla",
    "torch_neuronx",
    "neuronx_distributed",
    "hydra_plugins",
    "matplotlib",
    "uvicorn",
    "gunicorn",
    "huey",
)
# Stands in for an environment without these packages: the import system does not find them.
BARE = f"""
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            return None
        return super().find_spec(name, path, target)
place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = Without
from layerparity.cli import main
code = 0
for line in sys.argv[1:]:
    sys.argv = ["run.py", *line.split()]
    from hydra.core.global_hydra import GlobalHydra
    GlobalHydra.instance().clear()
    code = main()
    if code:
        break
sys.exit(code)
"""


def python(folder: Path, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and unpack it where nothing of the source tree is near."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_what_it_needs(installed: Path) -> None:
    package = installed / "layerparity"
    assert (package / "conf" / "config.yaml").is_file()
    assert (package / "experiments" / "quickstart.yaml").is_file()
    assert (package / "checkpoints" / "tiny_minimax_m2" / "model.safetensors").is_file()
    assert list(package.rglob("*.j2"))
    scripts = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "layerparity = layerparity.cli:main" in scripts.read_text()


def test_experiments_work_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    ended = python(
        tmp_path, "-m", "layerparity", "--cfg", "job", "experiment=quickstart", path=installed
    )
    assert ended.returncode == 0, ended.stderr
    assert "job=compare" in ended.stdout
    where = python(
        tmp_path, "-c", "import layerparity; print(layerparity.__file__)", path=installed
    )
    assert where.stdout.startswith(str(installed))


def test_golden_and_comparison_work_without_the_optional_packages(
    installed: Path, tmp_path: Path
) -> None:
    ended = python(
        tmp_path,
        "-c",
        BARE,
        "backend=gpu device_map=cpu",
        "backend=gpu device_map=cpu kind=candidate attn_implementation=eager",
        "job=compare",
        path=installed,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS" in ended.stdout


def test_neuron_without_torch_xla_says_how_to_get_it(installed: Path, tmp_path: Path) -> None:
    ended = python(tmp_path, "-c", BARE, "backend=neuron", path=installed)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "torch_xla" in ended.stderr
    assert "torch_xla==2.9.0" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.rglob("manifest.json")) == []
