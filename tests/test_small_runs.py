"""Every benchmark, tool and experiment runs: here on little, or where this file says.

The folders are listed, so one that is new fails until it has its words or its file of tests.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Ended, first_blocks
from pages import PAGES, blocks

from layerparity.backends.known import neuron
from layerparity.machine.device import Affinity

Cli = Callable[..., Ended]
MAIN = 'if __name__ == "__main__":'
# Words of each benchmark with which it takes a second or a few, and what is then in its table.
BENCHMARKS = {
    "block": [("--tiny --tokens 8", "| gpu | 8 | yes |")],
    "compare": [
        ("--elements 8192 --repeats 1 --threads 1", "| hash of the reference |"),
        ("--memory --elements 65536 --layers 1", "10 sites, 9 of them by a reference"),
    ],
    "corpus": [("--cases 3 --seed 3", "causes printed at 70% or more are true, in")],
    "detection": [
        (
            "--settings llama --dtypes float32 --only 'clean norms' 'q_proj 1.0%'",
            "| self_attn.q_proj 1.0% too large | 4 of 4 | 4 of 4 | 2 of 2 | 2 of 2 |",
        )
    ],
    "growth": [
        (
            "--rows sites npz --rounds 1 --times 0.0625",
            "| arrays of one .npz | `job=compare` | 25 50 100 200",
        )
    ],
    "logits": [("--models llama --slips 0.3 --ways 'tp 2'", "| verdict |  | 0 of 2 | 30.0% |")],
    "mutations": [("--count 3 --seed 1", "Unforeseen faults")],
    "packing": [("--rounds 1 --rows 128 --columns 256 --matrices 2", "| awq | 0 | 1 |")],
    "reference": [("--tiny --rounds 1 --cases 'one block'", "| one block | this |")],
    "small": [("--rounds 1 --uncounted 0 --cases blocks --layers 2", "| 2 x 50 | this |")],
    "store": [("--runs 3", "| job=gc |")],
    "stream": [("--models tiny --rounds 1 --tokens 8 --caches cold", "| disk offload |")],
    "sweep": [("--parts 3", "| this |")],
}
# Of each tool, the file of tests that runs it, and how it stands there.
TOOLS = {
    "check": ("test_check.py", "check.main("),
    "curve": ("test_selftest.py", '"tools/curve.py"'),
    "docs_site": ("test_docs_site.py", "site.main("),
    "families": ("test_families_table.py", '"families.py"'),
    "faults": ("test_make_faults.py", '"faults.py"'),
    "gallery": ("test_docs_site.py", "gallery.main("),
    "fuzz": ("test_fuzz.py", '"fuzz.py"'),
    "house": ("test_house.py", "house.main("),
    "mutants": ("test_mutants.py", "mutants.main("),
    "nxd_signatures": ("test_nxdi_sources.py", "nxd_signatures.main("),
    # Its cases need sources of NxDI, which are nobody's to ship; without them it has none.
    "nxdi_sources": ("test_nxdi_sources.py", '"nxdi_sources.py"'),
    "vllm_neuron_sources": ("test_vllm_neuron.py", "sources.main("),
    "packing_mistakes": ("test_packing.py", "packing_mistakes.cells("),
    "published": ("test_published.py", "published.main("),
    "sharding": ("test_sharding.py", '"sharding.py"'),
}
# By hand: it takes minutes and a browser. tests/test_browser.py opens the same pages.
BY_HAND = {"screenshots"}
# Half an hour each: the file of tests that runs it with less. Pages run others; the rest is here.
EXPERIMENTS = {
    "clean": "test_selftest.py",
    "selftest": "test_selftest.py",
}
ON_CPU = "backend=gpu device_map=cpu"
# Through XLA, which takes seconds to compile, only what is about compiling.
HERE = {
    "compiled_parity": "scope=single layer=0 seq_len=8",
    "generate_parity": "generate.max_new_tokens=2",
}


def programs(folder: str) -> list[str]:
    found = (path for path in (ROOT / folder).glob("*.py") if MAIN in path.read_text())
    return sorted(path.stem for path in found)


@pytest.mark.parametrize("name", programs("benchmarks"))
def test_a_benchmark_runs_on_little(tmp_path: Path, name: str) -> None:
    assert name in BENCHMARKS, "give it words with which it takes a second"
    for words, shows in BENCHMARKS[name]:
        said = ran("benchmarks", name, *shlex.split(words), cwd=tmp_path)
        assert said.returncode == 0, said.stdout + said.stderr
        assert shows in said.stdout


def ran(folder: str, name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / folder / f"{name}.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, check=False, cwd=cwd)


def test_what_a_child_could_not_do_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "benchmark-checkpoints" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "nobody"}')
    said = ran("benchmarks", "stream", "--models", "tiny", cwd=tmp_path)
    assert said.returncode == 1
    assert "model type `nobody`" in said.stderr


@pytest.mark.parametrize(
    "path",
    [path for each in ("benchmarks", "tools") for path in (ROOT / each).glob("*.py")],
    ids=str,
)
def test_no_program_keeps_what_a_child_that_must_succeed_says_of_an_error(path: Path) -> None:
    """Where ``check=True`` raises, the exception names the command alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        given = {each.arg: each.value for each in getattr(node, "keywords", ())}
        if getattr(given.get("check"), "value", None) is True:
            assert not {"capture_output", "stderr"} & given.keys(), f"line {node.lineno}"


@pytest.mark.parametrize("name", sorted({*programs("tools")} - BY_HAND))
def test_a_tool_is_run_by_a_file_of_tests(name: str) -> None:
    assert name in TOOLS, "name the file of tests that runs it"
    file, words = TOOLS[name]
    assert words in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "experiments").glob("*")))
def test_an_experiment_is_run_by_a_page_or_a_file_of_tests(name: str) -> None:
    word = f"experiment={name}"
    run = (block.commands for page in PAGES for block in blocks(page) if block.is_run)
    by_pages = any(word in each and "--cfg" not in each for block in run for each in block)
    by_tests = (
        name in EXPERIMENTS and f'"{word}",' in (ROOT / "tests" / EXPERIMENTS[name]).read_text()
    )
    assert by_pages or by_tests or name in HERE, "let a page run it, or give it words here"


@pytest.fixture(scope="module")
def first_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint, of which only the first block is in the model."""
    return first_blocks(tmp_path_factory.mktemp("model") / "first", 1)


@pytest.fixture
def without_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the steps of an experiment of two runtimes run on the CPU, by the words it may have."""
    if name != "generate_parity":
        return
    absent = Affinity(0, "none", "XLA is left out", is_absent=True)
    monkeypatch.setattr(neuron, "affinity", lambda: absent)
    own = tmp_path / "experiments" / f"{name}.yaml"
    own.parent.mkdir()
    shipped = (ROOT / "experiments" / own.name).read_text()
    own.write_text(f"{shipped}  without: {{neuron: {ON_CPU} kind=candidate}}\n")


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize("name", HERE)
def test_an_experiment_runs_on_little(cli: Cli, first_block: Path, name: str) -> None:
    model = ("model=checkpoint", f"model.path={first_block}")
    ended = cli(f"experiment={name}", *HERE[name].split(), *model)
    assert ended.exit == 0, ended.out + ended.err
