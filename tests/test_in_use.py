"""Runs in use: who reads one keeps it from being removed, and who removes one has it alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerparity.tracking import in_use

ONE, OTHER = "1" * 32, "2" * 32
CHILD = """
import sys
from pathlib import Path
from layerparity.tracking import in_use
root, how, run = sys.argv[1:]
print(getattr(in_use, how)(Path(root), run), flush=True)
sys.stdin.read()
"""


@contextmanager
def elsewhere(root: Path, how: str, run: str) -> Iterator[str]:
    """Hold or take a run in another process until the block ends; yield what that was told."""
    words = [sys.executable, "-c", CHILD, str(root), how, run]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("")


def test_what_another_process_reads_is_not_taken(tmp_path: Path) -> None:
    with elsewhere(tmp_path, "hold", ONE) as told:
        assert told == "True"
        assert not in_use.take(tmp_path, ONE)
        assert in_use.take(tmp_path, OTHER), "a run is one byte of the file"
        # Any number may read it.
        assert in_use.hold(tmp_path, ONE)
    assert in_use.take(tmp_path, ONE), "its hold ended with its process"
    assert in_use.held(tmp_path) == frozenset()


def test_what_this_process_takes_nobody_reads_or_takes(tmp_path: Path) -> None:
    assert in_use.take(tmp_path, ONE)
    for how in ("hold", "take"):
        with elsewhere(tmp_path, how, ONE) as told:
            assert told == "False"
    in_use.release(tmp_path, ONE)
    with elsewhere(tmp_path, "take", ONE) as told:
        assert told == "True"
        assert not in_use.hold(tmp_path, ONE)


def test_a_process_may_remove_what_it_read_itself(tmp_path: Path) -> None:
    assert in_use.hold(tmp_path, ONE)
    assert in_use.held(tmp_path) == {ONE}
    with elsewhere(tmp_path, "take", ONE) as told:
        assert told == "False"
    assert in_use.take(tmp_path, ONE) and in_use.held(tmp_path) == frozenset()
