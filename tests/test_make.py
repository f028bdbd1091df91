"""The Makefile's choice of an interpreter, and that it names one where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.specifiers import SpecifierSet

from layerparity.doctor import packages

NAMES = ("python3.11", "python3.12", "python3.13")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def chosen(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Say what ``make house`` would run, where the PATH has these interpreters and nothing else."""
    shell = f"SHELL={shutil.which('sh')}"
    return subprocess.run(
        [str(shutil.which("make")), "--no-print-directory", "-n", "-C", str(ROOT), shell, *words],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def put(folder: Path, name: str, works: bool = True) -> None:
    """Make an interpreter that has ensurepip, or one that is found and does not run."""
    (folder / name).write_text(f"#!/bin/sh\nexit {0 if works else 127}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("first", NAMES)
def test_the_first_interpreter_that_works_is_taken(tmp_path: Path, first: str) -> None:
    for name in NAMES:
        put(tmp_path, name, works=name >= first)
    ended = chosen(tmp_path, "house")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{first} tools/house.py")


def test_another_interpreter_is_taken_where_it_is_named(tmp_path: Path) -> None:
    put(tmp_path, "python3.11")
    ended = chosen(tmp_path, "house", "PYTHON=python3.14")
    assert ended.stdout.startswith("python3.14 tools/house.py"), ended.stderr


def test_where_none_works_make_says_what_to_install(tmp_path: Path) -> None:
    put(tmp_path, "python3.12", works=False)
    ended = chosen(tmp_path, "house")
    assert ended.returncode == 2
    assert "none of python3.11, python3.12 and python3.13 runs here" in ended.stderr
    assert "make PYTHON=..." in ended.stderr
    # What needs no interpreter works without one.
    assert chosen(tmp_path, "clean").returncode == 0


def test_make_and_the_doctor_take_the_same_interpreters() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"for each in {' '.join(NAMES)};" in makefile
    assert tuple(f"python3.{last}" for _, last in packages.PYTHONS) == (NAMES[0], NAMES[-1])
    (line,) = (
        each
        for each in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        if each.startswith("requires-python")
    )
    allowed = SpecifierSet(line.split('"')[1])
    assert all(name.removeprefix("python") in allowed for name in NAMES)
    assert "3.10" not in allowed
