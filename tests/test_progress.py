"""Progress: what a step is at, a line now and then in a log, how long the rest takes."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Ended
from fp8_small import fp8_copy

from layerparity.cli import output
from layerparity.ground import console, log, progress
from layerparity.ground.progress import Progress
from layerparity.making.evaluate import Evaluator
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.reading import Files
from layerparity.ports.known.hf import HfPort
from layerparity.record.exported import FILE as EXPORT

Capsys = pytest.CaptureFixture[str]


class Clock:
    """Stands still unless it is told to go on, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that progress is told the time by; nothing looks at it unasked."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 1e6)
    return clock


def test_a_line_comes_every_30_seconds_also_within_a_block(clock: Clock, capsys: Capsys) -> None:
    with progress.shown("blocks", 62) as work:
        for second in range(1, 101):
            clock.now += 1
            if second == 40:
                work.step("layers.0")
            if second == 41:
                progress.doing("layers.1: waiting for weights")
            with progress.measured(lambda: "3.10 GB of 7.34 GB read"):
                work.tell()
    assert capsys.readouterr().out.splitlines() == [
        "blocks: 0 of 62; 30 s so far",
        "blocks: 1 of 62, layers.1: waiting for weights, 3.10 GB of 7.34 GB read; 60 s so far, "
        "about 40 min left",
        "blocks: 1 of 62, layers.1: waiting for weights, 3.10 GB of 7.34 GB read; 90 s so far, "
        "about 45 min left",
    ]


def test_short_work_says_its_end_alone(clock: Clock, capsys: Capsys) -> None:
    with progress.shown("blocks", 2) as work:
        for layer in range(2):
            clock.now += 10
            progress.doing(f"layers.{layer}: compute")
            work.step(f"layers.{layer}")
            work.tell()
    assert capsys.readouterr().out == "blocks: 2 of 2 layers.1\n"


def test_nothing_is_promised_before_a_block_is_done(clock: Clock) -> None:
    work = Progress("blocks", 10)
    clock.now += 100
    assert work.left() == ""
    # Found done, and the embedding: neither says what a block takes.
    work.step("layers.0", timed=False)
    clock.now += 1
    work.step("embed_tokens", timed=False)
    assert work.left() == ""
    clock.now += 60
    assert work.left() == ""
    work.step("layers.1")
    assert work.left() == "about 7 min left"
    clock.now += 30
    assert work.left() == "about 6 min left"


def test_a_step_that_takes_longer_than_the_others_says_more_than_they_do(clock: Clock) -> None:
    work = Progress("blocks", 3)
    clock.now += 10
    work.step("layers.0")
    assert work.left() == "about 20 s left"
    clock.now += 90
    assert work.left() == "about 50 s left"
    work.step("layers.1")
    clock.now += 70
    assert work.left() == "", "what should be done by now is not promised"


def test_a_step_counts_by_its_weight(clock: Clock) -> None:
    work = Progress("blocks", 4, weights=[1, 2, 6, 1])
    clock.now += 10
    work.step("layers.0")
    assert (work.left(), work.done, work.total) == ("about 90 s left", 1, 4)
    clock.now += 15
    assert work.left() == "about 75 s left"
    clock.now += 15
    # It weighs 2: three in 40 s, and seven are to come.
    assert work.left() == "about 93 s left"
    work.step("layers.1")
    assert work.left() == "about 93 s left"
    work.step("layers.2")
    work.step("lm_head")
    assert work.left() == ""


def test_steps_that_weigh_nothing_promise_nothing(clock: Clock) -> None:
    work = Progress("files", 3, weights=[0, 0, 5])
    clock.now += 10
    work.step("empty")
    assert work.left() == ""


def test_what_is_not_timed_weighs_nothing(clock: Clock) -> None:
    work = Progress("blocks", 3, weights=[50, 2, 4])
    clock.now += 1
    work.step("embed_tokens", timed=False)
    clock.now += 10
    work.step("layers.0")
    assert work.left() == "about 20 s left"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[float]]]:
    """Return what progress is shown of: its title, how many steps, and their weights."""
    told, own = [], progress.shown

    def spy(title: str, total: int, weights: Sequence[float] = ()) -> AbstractContextManager:
        told.append((title, total, list(weights)))
        return own(title, total, weights)

    monkeypatch.setattr(progress, "shown", spy)
    return told


def test_files_weigh_their_bytes(cli: Callable[..., Ended], told: list, tmp_path: Path) -> None:
    where = ("backend=gpu", "device_map=cpu", "scope=range", "start=0", "end=1")
    assert cli(*where).exit == 0
    assert cli("job=export", "run=latest", "to=carried").exit == 0
    ((total, weights),) = [each[1:] for each in told if each[0] == "files"]
    files = [path for path in (tmp_path / "carried").rglob("*") if path.is_file()]
    sizes = sorted(path.stat().st_size for path in files if path.name != EXPORT)
    assert (sorted(weights), total) == (sizes, len(sizes))
    source = fp8_copy(ROOT / "checkpoints/tiny_minimax_m2", tmp_path / "fp8", 3)
    assert cli("job=convert", f"model.path={source}", "to=bf16").exit == 0
    ((total, weights),) = [each[1:] for each in told if each[0] == "shards"]
    shards = sorted(Path("bf16").glob("*.safetensors"))
    # A header, too, is in a file.
    sizes = [path.stat().st_size for path in shards]
    assert total == len(shards) == 3
    assert all(0 <= size - each < 10_000 for size, each in zip(sizes, weights, strict=True))


def test_blocks_weigh_what_is_stored_of_them_and_a_streamed_token_all_of_it(
    cli: Callable[..., Ended], made: Callable[..., Path], told: list
) -> None:
    folder = made("qwen3_moe")
    Path("tokens.json").write_text("[[5, 6, 7]]")
    asked = (
        "backend=gpu", "kind=candidate", "scope=full", "model=checkpoint", f"model.path={folder}",
        "inputs=tokens", "inputs.file=tokens.json", "generate.max_new_tokens=3",
    )  # fmt: skip
    for where in ("cpu", "stream"):
        ended = cli(*asked, f"device_map={where}")
        assert ended.exit == 0, ended.err
    stored = {each.name: each.bytes for each in Checkpoint(folder).tensors.values()}
    bytes_of = [
        sum(size for name, size in stored.items() if name.startswith(begin))
        for begin in (
            "model.embed_tokens", *(f"model.layers.{n}." for n in range(3)), "model.norm", "lm_head"
        )
    ]  # fmt: skip
    assert sum(bytes_of) == sum(stored.values())
    stages = [math.sqrt(1 + each) for each in bytes_of]
    assert [title for title, *_ in told] == ["blocks and tokens"] * 2
    resident, streamed = (weights for *_, weights in told)
    assert resident == pytest.approx([*stages, *[sum(stages) / 6] * 2])
    assert streamed == pytest.approx([*stages, *[sum(stages)] * 2])


def test_durations_are_said_as_a_person_does() -> None:
    seconds = (0.4, 95, 119, 120, 3600, 7170, 11_100)
    said = ["0 s", "95 s", "119 s", "2 min", "60 min", "2 h 00 min", "3 h 05 min"]
    assert [console.duration_text(each) for each in seconds] == said


def test_steps_in_brief_show_their_progress_where_they_are_long(
    clock: Clock, capsys: Capsys
) -> None:
    with console.brief("layer 3", set()), progress.shown("blocks", 9) as work:
        clock.now += 31
        work.step("layers.0")
    said = "layer 3: blocks: 1 of 9 layers.0; 31 s so far, about 4 min left\n"
    assert capsys.readouterr().out == said


def test_a_child_s_notes_and_progress_are_said_as_one_s_own(clock: Clock, capsys: Capsys) -> None:
    with console.to_be_relayed():
        console.say("a line")
        console.note("the device is a stand-in")
        with progress.shown("layers", 9) as work:
            clock.now += 6
            work.step("layers.0")
            progress.doing("layers.1: compute")
            clock.now += 6
            work.tell()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4, "a line, a note, and progress twice"

    def slowly() -> Iterator[str]:
        for line in [*said, said[-1]]:
            yield line
            clock.now += 29

    with console.brief("layer 3", set()):
        progress.relay(slowly())
    # How long the rest takes is told by the child: this process learned of the block late.
    assert capsys.readouterr().out.splitlines() == [
        "note: the device is a stand-in",
        "layer 3: blocks: 1 of 9, layers.1: compute; 58 s so far, about 42 s left",
    ]
    progress.relay(["5", '{"other": 1}', "x: 1 of 2"])
    assert capsys.readouterr().out == '5\n{"other": 1}\nx: 1 of 2\n'


def test_the_log_of_a_run_whose_progress_is_relayed_has_lines_of_its_own(
    clock: Clock, capsys: Capsys
) -> None:
    log.end()
    lines = log.Lines()
    with console.to_be_relayed(), progress.shown("blocks", 9) as work:
        for second in range(1, 66):
            clock.now += 1
            if second == 10:
                work.step("layers.0")
            work.tell()
    lines.close()
    told = [re.sub(r"^.*INFO +", "", line) for line in lines.text().splitlines()]
    assert told == [
        "blocks: 1 of 9 layers.0; 30 s so far, about 105 s left",
        "blocks: 1 of 9 layers.0; 60 s so far, about 4 min left",
    ]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 13 and all(line.startswith('{"progress"') for line in said)


def test_quiet_prints_no_progress_and_the_log_has_it(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in (output.QUIET, output.JSON):
        lines = log.Lines()
        with output.taken([word]), progress.shown("blocks", 9) as work:
            clock.now += 31
            work.tell()
        lines.close()
        assert capfd.readouterr().out == ""
        assert "blocks: 0 of 9; 31 s so far" in lines.text()


ON_A_TERMINAL = """
import time
from layerparity.ground import progress
with progress.shown("blocks", 3) as work:
    time.sleep(1.2)
    work.step("layers.0")
    with progress.measured(lambda: "3.10 GB of 7.34 GB read"):
        progress.doing("layers.1: waiting for weights")
        time.sleep(0.4)
"""


def test_a_terminal_shows_what_a_block_is_at() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=theirs, env=environment
    ) as child:
        os.close(theirs)
        shown = b""
        # The end of a terminal is an error.
        with suppress(OSError):
            while more := os.read(ours, 65536):
                shown += more
        assert child.wait() == 0
    os.close(ours)
    text = shown.decode()
    assert "layers.1: waiting for weights, 3.10 GB of 7.34 GB read" in text
    assert "1/3" in text
    assert re.search(r"about \d+ s left", text)


def test_a_run_s_log_tells_while_it_works(
    cli: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run of which everything is slow, its intervals short: ``tail -f`` shows it."""
    seen: list[str] = []
    logs = "kept/artifacts/*/artifacts/log.txt"

    def slowed(owner: type, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(self: Any, *args: Any, **keys: Any) -> Any:
            # What evaluates the reference is a port too.
            if type(self) is owner:
                if owner is Evaluator:
                    seen[:] = [each.read_text() for each in tmp_path.glob(logs)]
                time.sleep(seconds)
            return function(self, *args, **keys)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr(progress, "_LOG_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    slowed(Files, "read", 0.002)
    slowed(HfPort, "run", 0.5)
    slowed(Evaluator, "evaluate", 0.03)
    where = f"tracking.folder={tmp_path / 'kept'}"
    ended = cli("backend=gpu", "device_map=cpu", "scope=range", "start=0", "end=3", where)
    assert ended.exit == 0, ended.err
    (while_at_work,) = seen
    for text in (ended.out, while_at_work):
        assert re.search(r"of 5, \S+: waiting for weights, [\d.]+ \w+ of [\d.]+ \w+ read; ", text)
        assert re.search(r"of 5, layers\.\d: compute; \d+ s so far", text)
        assert re.search(r"of 5, layers\.\d: reference, \d of \d: float32 \w+", text)
    # Nothing is promised yet.
    assert re.search(r"1 of 5, layers\.0: .* s so far$", while_at_work, re.M)
    assert re.search(r"2 of 5, layers\.1: .*, about \d+ s left$", while_at_work, re.M)
