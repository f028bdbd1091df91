"""The doctor's table: a check that fails has its line, what is wrong a cure, and the status."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.doctor import base
from layerparity.doctor.base import Check, Result, Section, State
from layerparity.ground import registry
from layerparity.ground.errors import Exit, UserError
from layerparity.jobs import doctor
from layerparity.settings.config import Config
from layerparity.tracking.process import terminable


@pytest.mark.parametrize(
    ("error", "found", "cure"),
    [
        (RuntimeError("no such register"), "RuntimeError: no such register", "report it"),
        (SystemExit(7), "SystemExit: 7", "report it"),
        (UserError("The disk is full", "make room."), "The disk is full", "make room."),
        (UserError("No room: none: make some."), "No room: none: make some.", "see the message"),
    ],
)
def test_a_check_that_fails_is_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, found: str, cure: str
) -> None:
    def look(config: Any) -> Any:
        yield base.ok("first", "was fine")
        raise error

    after = Check("z", Section.SOFTWARE, lambda config: [base.ok("same file", "stands")])
    last = Check("a", Section.FILES, lambda config: [base.ok("last", "too")])
    broken = SimpleNamespace(CHECKS=(after, Check("broken", Section.SOFTWARE, look)))
    fine = SimpleNamespace(CHECKS=(last,))
    monkeypatch.setattr(registry, "names", lambda package: ["broken", "fine"])
    monkeypatch.setattr(registry, "load", lambda _, name: {"broken": broken, "fine": fine}[name])
    results = base.examine(Config())
    assert [(each.check, each.state) for each in results] == [
        ("first", State.OK),
        ("broken", State.PROBLEM),
        ("same file", State.OK),
        ("last", State.OK),
    ]
    assert results[1].found == found
    assert cure in results[1].cure


def test_a_signal_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(config: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        yield base.ok("first", "after the signal")

    checks = SimpleNamespace(CHECKS=(Check("stopped", Section.SOFTWARE, look),))
    monkeypatch.setattr(registry, "names", lambda package: ["stopped"])
    monkeypatch.setattr(registry, "load", lambda *_: checks)
    with pytest.raises(SystemExit) as stopped, terminable():
        base.examine(Config())
    assert stopped.value.code == 128 + signal.SIGTERM


def test_a_check_that_does_not_import_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(package: str, name: str) -> Any:
        raise ImportError("no module named nothing")

    monkeypatch.setattr(registry, "load", load)
    results = base.examine(Config())
    assert {each.state for each in results} == {State.PROBLEM}
    assert "ImportError: no module named nothing" in results[0].found


def test_what_is_wrong_has_a_cure() -> None:
    with pytest.raises(ValueError, match="without a cure"):
        Result("x", State.WARNING, "slow")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([base.ok("a", "fine")], Exit.OK),
        ([base.ok("a", "fine"), base.warning("b", "slow", "wait")], Exit.OK),
        ([base.problem("a", "gone", "get it"), base.ok("b", "fine")], Exit.NOT_READY),
    ],
)
def test_a_problem_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, lines: list[Result], status: Exit
) -> None:
    one = SimpleNamespace(CHECKS=(Check("a", Section.SOFTWARE, lambda config: lines),))
    monkeypatch.setattr(registry, "names", lambda package: ["one"])
    monkeypatch.setattr(registry, "load", lambda package, name: one)
    assert doctor.run(Config()) is status
