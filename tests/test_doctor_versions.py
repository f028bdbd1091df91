"""The doctor on versions: what is as tested, what is other than tested, and what cannot work."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.requirements import Requirement

from layerparity.doctor import packages
from layerparity.doctor.base import State
from layerparity.machine import neuron_flavour
from layerparity.settings.config import Config


@pytest.mark.parametrize(
    ("version", "known", "is_same"),
    [
        ("2.9.1", "2.9.1", True),
        ("2.9.1+cpu", "2.9.1", True),
        ("2.9.1+cu128", "2.9.1+cpu", True),
        ("2.9.1rc2", "2.9.1", False),
        ("2.9.1.dev20300101", "2.9.1", False),
        ("2.9.1.post1", "2.9.1", False),
        ("2.9.10", "2.9.1", False),
    ],
)
def test_another_build_is_the_same_version_and_a_candidate_of_it_is_not(
    version: str, known: str, is_same: bool
) -> None:
    assert packages.same(version, known) is is_same


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("1.3.0", None),
        ("1.3.0rc1", State.WARNING),
        ("1.4.0", State.WARNING),
        ("1.2.0", State.WARNING),
        ("1.1.9", State.PROBLEM),
        ("2.0.0", State.PROBLEM),
        (None, State.PROBLEM),
    ],
)
def test_what_is_not_asked_for_is_a_problem_and_what_is_not_tested_a_warning(
    monkeypatch: pytest.MonkeyPatch, version: str | None, state: State | None
) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: version)
    asked = Requirement("some.Package>=1.2,<2")
    line = packages._apart_from_tested(asked, {"some-package": "1.3.0"})
    assert (line and line.state) == state
    assert line is None or line.cure == "pip install some.Package==1.3.0"


@pytest.mark.parametrize(
    ("python", "state"),
    [
        ((3, 10, 14), State.WARNING),
        ((3, 11, 0), State.OK),
        ((3, 13, 9), State.OK),
        ((3, 14, 0), State.WARNING),
    ],
)
def test_pythons_that_are_tested(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, ...], state: State
) -> None:
    monkeypatch.setattr(neuron_flavour, "installed", lambda: None)
    monkeypatch.setattr(packages.sys, "version_info", python)
    (line,) = packages.check_python(Config())
    assert line.state is state


@pytest.mark.parametrize(
    ("torch", "xla", "state"),
    [
        ("2.9.1+cpu", "2.9.0", State.OK),
        ("2.10.0", "2.9.0", State.PROBLEM),
        ("2.9.1", "2.10.0", State.PROBLEM),
        ("3.9.1", "2.9.0", State.PROBLEM),
        ("2.9.1", "2.9.1", State.WARNING),
    ],
)
def test_torch_xla_is_made_for_one_torch(
    monkeypatch: pytest.MonkeyPatch, torch: str, xla: str, state: State
) -> None:
    def facts(*words: Any) -> dict[str, str]:
        return {"device": "xla:0"}

    monkeypatch.setattr(packages.probe, "ask", facts)
    assert packages._pair(torch, xla).state is state
