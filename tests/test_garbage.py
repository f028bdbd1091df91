"""What the collector passes over: imports, and what was before a run; never its tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator

import pytest

from layerparity.ground import garbage

COMMAND = """
import gc, sys
# Python 3.12 has some of its own.
before = gc.get_freeze_count()
from layerparity.cli import door
sys.argv = ["run.py", "--cfg", "job"]
assert gc.get_freeze_count() == before
assert door.main() == 0
import sqlalchemy
gc.collect(1)
print(gc.get_freeze_count())
"""


class Cycle:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector as a command has it, and nothing passed over yet."""
    before = list(gc.callbacks)
    monkeypatch.setattr(garbage, "_imported", [])
    gc.callbacks.clear()
    gc.unfreeze()
    garbage.pass_over_imports()
    yield
    gc.callbacks[:] = before
    gc.unfreeze()


def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module come."""
    name = f"came_just_now_{len(sys.modules)}"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def test_what_is_there_is_passed_over_whenever_modules_came(monkeypatch, watching):
    gc.collect(1)
    first = gc.get_freeze_count()
    assert first > 10_000
    kept = [[] for _ in range(100)]
    gc.collect(1)
    assert gc.get_freeze_count() <= first, "no module came"
    imported(monkeypatch)
    gc.collect(1)
    assert gc.get_freeze_count() >= first + len(kept)


def test_what_comes_later_is_collected(watching):
    gc.collect(1)
    cycle = Cycle()
    seen = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert seen() is None


def test_what_a_run_makes_is_collected_whatever_it_imports(monkeypatch, watching):
    before = Cycle()
    with garbage.passed_over():
        within, kept = Cycle(), Cycle()
        imported(monkeypatch)
        gc.collect(1)
        gc.collect(1)
        seen = [weakref.ref(each) for each in (within, kept, before)]
        del within, before
        gc.collect()
        assert [each() is None for each in seen] == [True, False, False]
    del kept
    imported(monkeypatch)
    gc.collect(1)
    gc.collect()
    assert [each() is None for each in seen] == [True, True, True]


def test_a_command_asks_for_it():
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.splitlines()[-1]) > 10_000
