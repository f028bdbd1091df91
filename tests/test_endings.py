"""How the parts of a sweep ended: the gravest counts, and so does one that says nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from layerparity.ground.errors import Exit, UserError
from layerparity.making import endings
from layerparity.making.endings import JobEnding


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    endings.begin()
    yield
    endings.begin()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder where two parts, ``layer=0`` and ``layer=1``, leave their endings."""
    endings.await_parts(tmp_path, ["layer=0", "layer=1"])
    return Path(os.environ[endings.VARIABLE])


def left(monkeypatch: pytest.MonkeyPatch, number: int, code: Exit, why: str = "") -> None:
    """Leave an ending as the process of a part does."""
    monkeypatch.setattr(
        endings, "HydraConfig", SimpleNamespace(get=lambda: _job(number)), raising=True
    )
    endings.leave(JobEnding(code, f"layer={number}", why))


def _job(number: int) -> SimpleNamespace:
    return SimpleNamespace(job=SimpleNamespace(num=number))


def test_a_sweep_without_parts_elsewhere_ends_as_its_jobs() -> None:
    assert endings.gravest() is Exit.OK and endings.silent_parts() == []
    for code in (Exit.OK, Exit.INCONCLUSIVE, Exit.FAILED, Exit.OK):
        endings.leave(JobEnding(code, "", ""))
    assert endings.gravest() is Exit.FAILED


@pytest.mark.parametrize(
    ("codes", "gravest"),
    [
        ((Exit.OK, Exit.OK), Exit.OK),
        ((Exit.OK, Exit.INCONCLUSIVE), Exit.INCONCLUSIVE),
        ((Exit.FAILED, Exit.INCONCLUSIVE), Exit.FAILED),
        ((Exit.FAILED, Exit.NOT_READY), Exit.NOT_READY),
        ((Exit.USER, Exit.NOT_READY), Exit.USER),
        ((Exit.USER, Exit.INTERNAL), Exit.INTERNAL),
    ],
)
def test_the_gravest_of_the_parts_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[Exit, Exit], gravest: Exit
) -> None:
    for number, code in enumerate(codes):
        left(monkeypatch, number, code)
    assert endings.silent_parts() == []
    assert endings.gravest() is gravest


def test_a_part_that_left_no_word_fails_the_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endings.silent_parts() == ["layer=0", "layer=1"]
    left(monkeypatch, 1, Exit.OK)
    assert endings.silent_parts() == ["layer=0"]
    assert endings.gravest() is Exit.USER
    assert endings.all_endings() == [JobEnding(Exit.OK, "layer=1", "")]
    left(monkeypatch, 0, Exit.OK)
    assert endings.gravest() is Exit.OK


def test_half_a_word_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, 0, Exit.OK)
    folder.joinpath("1.json").write_text(json.dumps({"exit": 0, "part": "layer=1", "why": ""})[:9])
    with pytest.raises(UserError, match="run the sweep again with reuse=true"):
        endings.gravest()


def test_what_an_earlier_sweep_left_in_its_folder_is_not_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings.await_parts(tmp_path, ["layer=0"])
    left(monkeypatch, 0, Exit.OK)
    endings.await_parts(tmp_path, ["layer=0"])
    assert endings.silent_parts() == ["layer=0"]


def test_the_folder_is_the_workers_and_goes_in_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endings.folder_of_others() is None, "the command itself runs no part"
    left(monkeypatch, 0, Exit.OK)
    assert folder.is_dir()
    endings.remove()
    assert not folder.exists() and endings.VARIABLE not in os.environ
