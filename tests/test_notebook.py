"""The worked notebook, and the page beside it: each cell and each block runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient
from pages import blocks

NOTEBOOK, PAGE = ROOT / "docs/how-to/python.ipynb", ROOT / "docs/how-to/python.md"
# What a machine or a person would leave in a notebook that was saved after it ran.
LEFT = re.compile(r"/(home|root|Users|tmp|work)/|\b[0-9a-f]{32}\b")


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in; whatever Jupyter keeps for a person is kept there."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *sys.path]))
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def shown(cell: Any, kind: str) -> str:
    """Return what a cell's outputs hold in one form."""
    found = [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]
    return "\n".join(found)


def test_the_notebook_is_kept_without_outputs() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
    assert LEFT.search(text) is None


def test_each_cell_of_the_notebook_runs_in_a_kernel(own_places: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(own_places)}},
    )
    client.execute()
    run, tensor, _, compared, rows, by_hand, mistake = [
        cell for cell in notebook.cells if cell.cell_type == "code"
    ]
    assert "deep_minimax_m2" in shown(run, "text/html")
    assert shown(tensor, "text/plain").startswith("torch.Size([1, ")
    assert "FAIL at layers.1.self_attn." in shown(compared, "text/html")
    assert "layers.1.self_attn.q_norm:out" in shown(rows, "text/html")
    assert re.fullmatch(r"\('layers\.1\.self_attn[\w.]*:\w+', \d.*\)", shown(by_hand, "text/plain"))
    (said,) = mistake.outputs
    assert said.name == "stdout"
    assert said.text.startswith("There is no key 'lyer'. Did you mean 'layer'?")
    streams = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    errors = [out.text for out in streams if out.get("name") == "stderr"]
    # A library's bar wants widgets that nobody asked for here; nothing else is complained of.
    assert [text for text in errors if "TqdmWarning: IProgress" not in text] == []
    assert [path.name for path in own_places.iterdir()] == ["mlruns"]


def test_the_blocks_of_the_page_run_one_after_the_other(own_places: Path) -> None:
    scripts = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(scripts) > 3
    text = "\n".join(line for block in scripts for line in block.lines)
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=own_places, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
