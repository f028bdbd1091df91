"""A command whose output nobody reads any more ends quietly, with the status that a shell gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from layerparity.ground import console
from layerparity.record.stored_run import FAILED
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

BROKEN = 141


def cut_off(folder: Path, *words: str, lines: int, both: bool = False) -> tuple[int, str]:
    """Run a command, read a few lines of a real pipe, close it; return its status and errors."""
    program = [sys.executable, str(ROOT / "run.py"), *words]
    errors = subprocess.STDOUT if both else subprocess.PIPE
    with subprocess.Popen(program, cwd=folder, stdout=subprocess.PIPE, stderr=errors) as command:
        assert command.stdout is not None
        for _ in range(lines):
            assert command.stdout.readline()
        command.stdout.close()
        said = command.stderr.read().decode() if command.stderr else ""
        return command.wait(300), said


@pytest.mark.parametrize(
    ("words", "lines", "both"),
    [
        (("--help",), 0, False),
        (("--version",), 0, False),
        (("job=plan", "model=minimax_m2"), 1, False),
        (("job=plan", "model=minimax_m2"), 1, True),
        (("-m", "job=plan", "model=minimax_m2,tiny_minimax_m2"), 1, False),
    ],
)
def test_a_command_that_nobody_reads_ends_quietly(
    tmp_path: Path, words: tuple[str, ...], lines: int, both: bool
) -> None:
    assert cut_off(tmp_path, *words, lines=lines, both=both) == (BROKEN, "")


def test_a_run_that_nobody_reads_is_not_filed_as_finished(tmp_path: Path) -> None:
    words = ("device_map=cpu", "scope=single", "layer=0", "inputs=random", "reference.make=false")
    status, said = cut_off(tmp_path, *words, lines=1)
    assert (status, "Traceback" in said, "internal error" in said) == (BROKEN, False, False)
    runs = open_store(TrackingConfig(folder=str(tmp_path / "mlruns"))).runs()
    assert {run.status for run in runs} <= {FAILED}


def test_another_pipe_that_breaks_is_no_silence() -> None:
    assert not console.abandoned(BrokenPipeError("a rank's socket"))
