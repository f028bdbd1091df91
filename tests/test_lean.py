"""What a command loads: a comparison of stored runs needs no model, so no library of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from runs import make_run, sites
from stores import fresh_config

ROOT = Path(__file__).parents[1]
# Everything that only builds, places or compiles a model.
MODELS = ("transformers", "accelerate", "torch_xla")
PROBE = """
import json, sys
sys.path.insert(0, {src!r})
from layerparity.cli.door import main
told = []
for words in {commands!r}:
    if told:
        from hydra.core.global_hydra import GlobalHydra
        GlobalHydra.instance().clear()
    sys.argv = ["run.py", *words]
    code = int(main())
    told.append([code, sorted(set({libraries!r}) & set(sys.modules))])
print(json.dumps(told), file=sys.stderr)
"""


def test_a_comparison_of_stored_runs_loads_no_library_of_models(tmp_path: Path) -> None:
    """Neither does one that fails, of runs whose checkpoint is not here."""
    fresh_config(tmp_path / "store")
    make_run(tmp_path / "golden", sites())
    commands = []
    for slip in (0.0, 0.5):
        candidate = sites()
        candidate["layers.1.mlp:out"] = candidate["layers.1.mlp:out"] + slip
        make_run(tmp_path / f"off-by-{slip}", candidate, kind="candidate", backend="neuron")
        sides = [f"golden={tmp_path / 'golden'}", f"candidate={tmp_path / f'off-by-{slip}'}"]
        place = f"tracking.folder={tmp_path / 'store'}"
        commands.append(["job=compare", *sides, place, "tolerance=fixed"])
    code = PROBE.format(src=str(ROOT / "src"), commands=commands, libraries=MODELS)
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
    (right, of_right), (wrong, of_wrong) = json.loads(ended.stderr.splitlines()[-1])
    assert right == 0 and wrong != 0, ended.stdout
    assert of_right == of_wrong == []
