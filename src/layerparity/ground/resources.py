"""Find the folders and files that come with layerparity, in a source tree and in a wheel."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from layerparity.ground.files import text_digest


def shipped(name: str) -> Path:
    """Return ``conf``, ``experiments``, ``checkpoints`` or ``constraints.txt`` of this code."""
    package = Path(__file__).resolve().parents[1]
    installed = package / name
    return installed if installed.exists() else package.parents[1] / name


@cache
def git_commit() -> str:
    """Return the commit of layerparity's own checkout, as `commit_of`; empty of a wheel.

    It is asked for once: the code that a process has read stays what it was.
    """
    folder = Path(__file__).resolve().parents[3]
    return commit_of(folder) if (folder / ".git").exists() else ""


def commit_of(folder: Path) -> str:
    """Return a checkout's commit, empty outside git; ``+changes-HASH`` where files differ.

    The hash is that of the differences: other changes make another run.
    """
    if shutil.which("git") is None:
        return ""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "diff", "HEAD", "--binary", "--no-ext-diff")
    return commit + (f"+changes-{text_digest(changed)[:8]}" if commit and changed else "")


def _git(folder: Path, *words: str) -> str:
    ended = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return ended.stdout.strip()
