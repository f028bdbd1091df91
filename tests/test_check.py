"""`make check` runs the tests that a change can reach, and no longer than it may."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import check
import pytest

SOURCE = "def one(): return 1\n\ndef two(): return 2\n"
TESTS = "from source import one, two\n\ndef test_one(): assert one() == 1\n"
# Its pytest may be a fork that has imported what pytest would rewrite.
SETTINGS = """
[tool.pytest.ini_options]
pythonpath = ["."]
filterwarnings = ["ignore:Module already imported"]
"""
MORE = "from source import one, two\n\ndef test_two(): assert two() == 2\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project of two functions, each with its test, that git knows."""
    files = {
        "source.py": SOURCE,
        "test_one.py": TESTS,
        "test_two.py": MORE,
        "values.yaml": "a: 1\n",
        "pyproject.toml": SETTINGS,
        ".gitignore": ".testmondata*\n__pycache__/\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    who = ("-c", "user.name=n", "-c", "user.email=e")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "All")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "DATA", tmp_path / ".testmondata")
    monkeypatch.setattr(check, "STEPS", ())
    monkeypatch.setattr(check, "TOOLS", Path(check.__file__).parent)
    return tmp_path


def test_only_what_a_change_reaches_is_run(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--seconds", "600"]) == 0
    said = capfd.readouterr().out
    assert "2 passed" in said and "make check SECONDS=3600" in said
    (project / "source.py").write_text(SOURCE.replace("return 2", "return 3"))
    (project / "values.yaml").write_text("a: 2\n")
    assert check.main(["--seconds", "600"]) == 1
    said = capfd.readouterr().out
    assert "1 failed" in said and "passed" not in said and "test_two" in said
    assert "No test is followed into values.yaml" in said and "SECONDS" not in said


def test_no_test_begins_once_the_time_is_up(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--seconds", "0", "--workers", "1"]) == 0
    said = capfd.readouterr().out
    assert "1 passed" in said and "The time is up" in said
    # What was left is run the next time, maybe with what was not yet noted.
    assert check.main(["--seconds", "600"]) == 0
    assert re.search("[12] passed", capfd.readouterr().out)
    assert check.main(["--seconds", "600"]) == 0
    assert "no tests ran" in capfd.readouterr().out


def test_a_failure_is_one_though_time_is_up(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "source.py").write_text(SOURCE.replace("return", "return -"))
    assert check.main(["--seconds", "0", "--workers", "1"]) != 0
    assert "The time is up" not in capfd.readouterr().out


def test_what_is_wrong_before_the_tests_ends_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "unformatted.py").write_text("a  =  1\n")
    monkeypatch.setattr(check, "STEPS", (("ruff", "format", "--check", "."),))
    assert check.main([]) == 1
    assert "passed" not in capfd.readouterr().out
