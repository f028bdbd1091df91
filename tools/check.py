"""What a small change needs: layout, rules, types, and the tests that ran what was changed.

    python tools/check.py                 # the tests: those that the change can reach, 90 s at most
    python tools/check.py --seconds 3600  # the first time: notes what each test runs

pytest-testmon follows each test through the Python files of its own process, function by function.
What a test starts in other processes, and what is no Python, it does not see: `make test` runs all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / ".testmondata"
TOOLS = ROOT / "tools"
# When the tests have to end, for the processes that run them: seconds since the epoch.
DEADLINE = "LAYERPARITY_CHECK_ENDS"
# Pytest's status where it was interrupted, and where no test was to be run.
CUT, NOTHING_TO_RUN = 2, 5
_LATE = "no time is left"
STEPS = (
    ("ruff", "format", "--check", "--quiet", "."),
    ("ruff", "check", "--quiet", "."),
    ("mypy",),
)


def main(words: Sequence[str]) -> int:
    """Check what the working tree changes; return the exit status."""
    parser = argparse.ArgumentParser(description="Check a small change.")
    parser.add_argument("--seconds", type=float, default=90, help="that the tests may take")
    parser.add_argument("--workers", type=int, default=2, help="files of tests run at a time")
    asked = parser.parse_args(words)
    for step in STEPS:
        if code := subprocess.run([sys.executable, "-m", *step], cwd=ROOT, check=False).returncode:
            return code
    _tell_what_is_not_followed()
    tests = ("pytest", "--testmon", "-p", "check")
    beside = ("-n", str(asked.workers), "--dist", "loadfile")
    environment = {
        # Its workers are its own, whoever runs it.
        **{k: value for k, value in os.environ.items() if not k.startswith("PYTEST_XDIST")},
        DEADLINE: str(time.time() + asked.seconds),
        # An empty part would be the folder of each process.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")])),
    }
    words = [sys.executable, "-m", *tests]
    if not DATA.exists():
        print("No test has been followed yet; make check SECONDS=3600 follows all of them once.")
        # Workers that make the database at once may each take it for the other's.
        subprocess.run(
            [*words, "--collect-only"],
            cwd=ROOT,
            env=environment,
            check=False,
            stdout=subprocess.DEVNULL,
        )
    code = subprocess.run([*words, *beside], cwd=ROOT, env=environment, check=False).returncode
    return 0 if code == NOTHING_TO_RUN else code


def _tell_what_is_not_followed() -> None:
    listing = ["git", "status", "--porcelain", "--untracked-files=normal"]
    changed = subprocess.run(
        listing, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    others = [line[3:] for line in changed.splitlines() if not line.endswith(".py")]
    if others:
        print(f"No test is followed into {', '.join(others)}: make test runs all.")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Begin no further test once the time is up. (Those left are asked for the next time.)"""
    if time.time() > float(os.environ[DEADLINE]):
        item.session.shouldstop = _LATE


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a session that only ran out of time pass, and say so."""
    cut = exitstatus == CUT and time.time() > float(os.environ[DEADLINE])
    if cut and not session.testsfailed and not hasattr(session.config, "workerinput"):
        session.exitstatus = 0
        print("\nThe time is up: what ran has passed; make check goes on, make test runs all.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
