"""A command that is suggested begins as the command that was typed, so that it can be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Ended

from layerparity.ground import program
from layerparity.settings.tracking import TrackingConfig


@pytest.mark.parametrize(
    ("called", "typed"),
    [
        ("run.py", "python run.py"),
        ("../my tools/run.py", "python '../my tools/run.py'"),
        ("/elsewhere/bin/layerparity", "/elsewhere/bin/layerparity"),
        ("/src/layerparity/__main__.py", "python -m layerparity"),
        ("/usr/bin/pytest", "python run.py"),
        ("", "python run.py"),
    ],
)
def test_a_suggestion_begins_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, called: str, typed: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert program.program() == typed


def test_the_installed_command_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "bin" / "layerparity"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{own.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", [str(own)])
    assert program.program() == "layerparity"
    # A wheel has no run.py.
    monkeypatch.setattr(program, "shipped", lambda name: tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ipython"])
    assert program.program() == "layerparity"


@pytest.mark.parametrize("door", [[str(ROOT / "run.py")], ["-m", "layerparity"]])
def test_a_cure_runs_where_it_was_printed(tmp_path: Path, door: list[str]) -> None:
    shown = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
    words = [sys.executable, *door, "job=compare"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, **shown)
    python, *again = shlex.split(ended.stderr.rpartition("make a golden first: ")[2])
    assert (python, again[: len(door)]) == ("python", door), ended.stderr
    assert shutil.which(sys.executable)
    dry = [sys.executable, *again, "dry_run=true"]
    shows = subprocess.run(dry, capture_output=True, text=True, check=False, **shown)
    assert shows.returncode == 0 and "dry run: nothing was made" in shows.stdout, shows.stderr


def test_help_shows_commands_as_they_are_typed(
    cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerparity.cli import help as help_text

    monkeypatch.setattr(sys, "argv", ["/src/layerparity/__main__.py"])
    for arguments in ([], ["job=gc"]):
        shown = help_text.answer(arguments)
        assert "python -m layerparity" in shown
        assert "run.py" not in shown


def test_a_cure_names_the_store_whole(cli: Callable[..., Ended], tmp_path: Path) -> None:
    assert TrackingConfig(experiment="other one").words == ["'tracking.experiment=\"other one\"'"]
    store = f"tracking.folder={tmp_path / 'runs'}"
    ended = cli("job=compare", store, "tracking.experiment=other")
    assert ended.exit == 2
    assert ended.err.strip().endswith(f"{store} tracking.experiment=other")
