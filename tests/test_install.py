"""Installed as a wheel, and without optional packages: what works, and what says it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from pages import blocks

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
from layerparity.cli.door import main
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


def call(command: list[str], folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def python(folder: Path, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    return call([sys.executable, *arguments], folder, str(path))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a release as RELEASING.md says, and install its wheel far from the source tree.

    Its dependencies are those of the environment that runs the tests.
    """
    folder = tmp_path_factory.mktemp("wheel")
    commands = [each for block in blocks(ROOT / "RELEASING.md") for each in block.commands]
    for _, *words in [each for each in commands if each[0] == "python"]:
        built = map(str, folder.iterdir())
        there = {"dist": [str(folder)], "dist/*": list(built)}
        told = [each for word in words for each in there.get(word, [word])]
        ended = call([sys.executable, *told], ROOT)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = folder.glob("*.whl")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    pip = ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    target = ["--target", str(folder / "site"), str(wheel)]
    put = call([sys.executable, "-m", *pip, *target], folder)
    assert put.returncode == 0, put.stderr
    return folder / "site"


def test_the_wheel_holds_what_it_needs(installed: Path, tmp_path: Path) -> None:
    package = installed / "layerparity"
    assert (package / "conf" / "config.yaml").is_file()
    assert (package / "constraints.txt").is_file()
    assert (package / "experiments" / "quickstart.yaml").is_file()
    assert (package / "checkpoints" / "tiny_minimax_m2" / "model.safetensors").is_file()
    assert list(package.rglob("*.j2"))
    where = python(
        tmp_path, "-c", "import layerparity; print(layerparity.__file__)", path=installed
    )
    assert where.stdout.startswith(str(installed))


def test_the_installed_command_runs_the_quickstart(installed: Path, tmp_path: Path) -> None:
    """Golden run, Neuron-path run and comparison, with all that the wheel has to bring along.

    Fewer tokens than usual: the pages' own quickstart generates them all.
    """
    pytest.importorskip("torch_xla", reason="the quickstart's candidate needs the extra xla")
    command = str(installed / "bin" / "layerparity")
    arguments = ["experiment=quickstart", "generate.max_new_tokens=2"]
    # By this interpreter, which the command's first line names as well: that is the test below.
    ended = python(tmp_path, command, *arguments, path=installed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mlruns"]
    (report,) = tmp_path.rglob("report.html")
    assert "</html>" in report.read_text(encoding="utf-8")


def test_the_installed_command_is_a_program(installed: Path, tmp_path: Path) -> None:
    asked = call([str(installed / "bin" / "layerparity"), "--version"], tmp_path, str(installed))
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.split()[0] == "layerparity"


def test_golden_and_comparison_work_without_the_optional_packages(
    installed: Path, tmp_path: Path
) -> None:
    ended = python(
        tmp_path,
        "-c",
        BARE,
        f"experiment=golden_reference device_map=cpu {SMALL}",
        f"backend=gpu device_map=cpu kind=candidate attn_implementation=eager {SMALL}",
        "job=compare",
        path=installed,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS" in ended.stdout


def test_the_quickstart_of_a_wheel_alone_says_that_it_is_no_verdict_on_neuron(
    installed: Path, tmp_path: Path
) -> None:
    """In an empty folder, with what `pip install` of the wheel without extras would bring."""
    line = "experiment=quickstart generate.max_new_tokens=2"
    ended = python(tmp_path, "-c", BARE, line, path=installed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS" in ended.stdout
    assert "note: torch_xla is not installed" in ended.stdout
    last = ended.stdout.strip().splitlines()[-1]
    assert last == "note: step 2 was not backend=neuron: this is no verdict on that backend"
    assert "XLA:CPU" not in ended.stdout.partition("[3 of 3]")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["mlruns"]


def test_neuron_without_torch_xla_says_how_to_get_it(installed: Path, tmp_path: Path) -> None:
    ended = python(tmp_path, "-c", BARE, "backend=neuron", path=installed)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "torch_xla" in ended.stderr
    assert "torch_xla==2.9.0" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.rglob("manifest.json")) == []
