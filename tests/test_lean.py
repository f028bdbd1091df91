"""What a command loads: a comparison of stored runs needs no model, so no library of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import make_run, sites
from stores import fresh_config

ROOT = Path(__file__).parents[1]
# Everything that only builds, places or compiles a model.
MODELS = ("transformers", "accelerate", "torch_xla")
PROBE = """
import json, sys
sys.path.insert(0, {src!r})
sys.argv = ["run.py", *{words!r}]
from layerparity.cli.door import main
code = main()
print(json.dumps([int(code), sorted(set({libraries!r}) & set(sys.modules))]), file=sys.stderr)
"""


@pytest.mark.parametrize("slip", [0.0, 0.5])
def test_a_comparison_of_stored_runs_loads_no_library_of_models(
    tmp_path: Path, slip: float
) -> None:
    """Neither does one that fails, of runs whose checkpoint is not here."""
    fresh_config(tmp_path / "store")
    golden, candidate = sites(), sites()
    candidate["layers.1.mlp:out"] = candidate["layers.1.mlp:out"] + slip
    make_run(tmp_path / "golden", golden)
    make_run(tmp_path / "candidate", candidate, kind="candidate", backend="neuron")
    words = [
        "job=compare",
        f"golden={tmp_path / 'golden'}",
        f"candidate={tmp_path / 'candidate'}",
        f"tracking.folder={tmp_path / 'store'}",
        "tolerance=fixed",
    ]
    code = PROBE.format(src=str(ROOT / "src"), words=words, libraries=MODELS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    exit_code, loaded = json.loads(ended.stderr.splitlines()[-1])
    assert (exit_code != 0) is (slip > 0), ended.stdout
    assert loaded == []
