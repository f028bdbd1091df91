"""A run keeps what was said while it was made; Hydra's logging gets the same lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.ground import console, log

RUN = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave logging as it was: Hydra sets it for a whole process."""
    level, handlers = logging.root.level, logging.root.handlers[:]
    yield
    logging.root.level, logging.root.handlers[:] = level, handlers
    console.only_log(False)


def kept(folder: Path) -> str:
    (file,) = folder.glob("artifacts/*/artifacts/log.txt")
    return file.read_text()


def test_a_run_keeps_its_story(cli: Callable[..., Ended], tmp_path: Path) -> None:
    ended = cli(*RUN, f"tracking.folder={tmp_path / 'kept'}")
    lines = kept(tmp_path / "kept")
    assert " INFO    golden run of tiny_minimax_m2, single 0, on gpu (cpu), float32" in lines
    assert "│ layers.0     │" in lines
    assert "blocks: 2 of 2 layers.0" in lines
    assert "DEBUG" not in lines + ended.err


def test_a_failed_run_says_why(cli: Callable[..., Ended], tmp_path: Path) -> None:
    ended = cli(*RUN, "capture.include=[nothing]", f"tracking.folder={tmp_path / 'kept'}")
    assert ended.exit == 2
    assert "ERROR   the run ends as FAILED: UserError: The run stored no site" in kept(
        tmp_path / "kept"
    )


def test_verbose_shows_what_libraries_say(cli: Callable[..., Ended], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    ended = cli(*RUN, "hydra.verbose=true", f"tracking.folder={folder}")
    assert "DEBUG filelock: Attempting to acquire lock" in ended.err
    assert ended.out.count("golden run of tiny_minimax_m2") == 1
    assert "golden run of" not in ended.err


@pytest.mark.parametrize("named", ["filelock", "[filelock,no.such]"])
def test_verbose_of_one_library_shows_that_one_alone(
    cli: Callable[..., Ended], tmp_path: Path, named: str
) -> None:
    folder = tmp_path / "kept"
    ended = cli(*RUN, f"hydra.verbose={named}", f"tracking.folder={folder}")
    logging.getLogger("filelock").setLevel(logging.NOTSET)
    said = [line for line in ended.err.splitlines() if line.startswith("DEBUG ")]
    assert said and all(line.startswith("DEBUG filelock: ") for line in said), ended.err
    assert "DEBUG   Attempting to acquire lock" in kept(folder)
    assert ended.out.count("golden run of tiny_minimax_m2") == 1
    log.begin(verbose=False)
    assert not [each for each in logging.getLogger("filelock").handlers if each.get_name()]
    log.end()


def test_hydras_job_logging_shows_each_line_once(cli: Callable[..., Ended], tmp_path: Path) -> None:
    words = ("job=plan", "model=tiny_minimax_m2", f"tracking.folder={tmp_path / 'kept'}")
    said = [json.loads(line) for line in cli(*words, "hydra/job_logging=json").out.splitlines()]
    assert sum("plan of tiny_minimax_m2" in each["message"] for each in said) == 1
    assert {each["level"] for each in said} == {"INFO"}


def test_one_job_forgets_what_another_said() -> None:
    log.begin(verbose=False)
    console.note("of the first job")
    log.begin(verbose=False)
    console.note("of the second")
    lines = log.Lines()
    console.note("of the run")
    lines.close()
    console.note("after it")
    assert [line.rpartition("note: ")[2] for line in lines.lines] == ["of the second", "of the run"]
