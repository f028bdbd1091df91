"""What a program reads of a command: nothing with --quiet, the verdict alone with --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import Ended

ROOT = Path(__file__).parents[1]
CANDIDATE = ("device_map=cpu", "kind=candidate", "scope=single", "layer=1", "inputs=golden")
WRONG = ("port=fault", "port.name=qk_norm_per_head", "golden=the-golden", "name=wrong")


def test_a_quiet_run_prints_nothing(run: Callable[..., Ended]) -> None:
    assert run(*CANDIDATE, *WRONG, "--quiet") == Ended(0, "", "")


def test_a_verdict_is_all_that_a_program_reads(run: Callable[..., Ended], store: Path) -> None:
    assert run(*CANDIDATE, *WRONG).exit == 0
    command = [sys.executable, str(ROOT / "run.py"), f"tracking.folder={store}", "job=compare"]
    ended = subprocess.run(
        [*command, "golden=the-golden", "candidate=wrong", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    verdict = json.loads(ended.stdout)
    assert verdict["guilty"]["site"].startswith("layers.1.self_attn")
    kept = max(store.glob("artifacts/*/artifacts/verdict.json"), key=lambda p: p.stat().st_mtime_ns)
    assert json.loads(kept.read_text(encoding="utf-8")) == verdict
    # The same where standard output is no file of the system's, as in a notebook.
    inside = run("job=compare", "golden=the-golden", "candidate=wrong", "--json")
    assert inside.exit == 1 and json.loads(inside.out)["guilty"] == verdict["guilty"]


def test_json_of_a_job_without_a_verdict_is_refused(cli: Callable[..., Ended]) -> None:
    ended = cli("job=doctor", "--json")
    assert ended.exit == 2 and ended.out == ""
    assert ended.err == (
        "layerparity: --json prints a verdict, and job=doctor makes none: "
        "use --quiet, or job=compare.\n"
    )
    # What was asked of one command is not asked of the next.
    assert cli("--version").out
