"""resume=true and the race of reuse=true: nothing twice, nothing lost, not a bit different."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Ended
from faults_child import Child, Task
from faults_child import Ended as Done
from faults_held import computed
from filelock import Timeout
from stores import fresh_config, fresh_store

from layerparity.ground.errors import UserError
from layerparity.making import reuse
from layerparity.making.journal import Journal
from layerparity.record.progress import Circumstances, FinishedStage, ProgressWriter, read_progress
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
CPU = ("backend=gpu", "device_map=cpu")
FED = ("inputs=prompt", "seq_len=6", "reference.dtypes=[bfloat16]")
SHORT = (*FED, "reference.components=false")
ANEW = "note: no interrupted run of this fingerprint can go on: the run begins anew"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Two stages, the embedding and a block, of a candidate: nothing is computed beside them.
TWO = (*CPU, "inputs=prompt", "kind=candidate", "scope=single", "layer=0")


def contents(store: Path) -> list[dict[str, str]]:
    """Return the hashes of all that each whole run of a store computed, by file."""
    return [computed(each.parent) for each in store.glob("artifacts/*/artifacts/manifest.json")]


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], None]]:
    """Return what lets every run from now on be stopped by Ctrl-C after so many notes."""
    note, left = Journal.note, [-1]
    handlers = {each: signal.getsignal(each) for each in ENDING}

    def counted(*arguments) -> None:
        note(*arguments)
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "note", counted)

    def after(notes: int | None) -> None:
        left[0] = notes or -1
        # A command that was stopped ignores them for good, as if the process ended with it.
        for number, handler in handlers.items():
            signal.signal(number, handler)

    yield after
    after(None)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("words", "notes", "resumed"),
    [
        # Nine stages, and a note for each token: at the third one two steps wait for the last.
        ((*CPU, *SHORT, "generate.max_new_tokens=4"), 6, 2),
        (("device_map=stream", *FED, "dtype=bfloat16", "capture=components"), 4, 2),
        (("backend=neuron", *SHORT, "generate.max_new_tokens=3"), 7, 1),
        (("backend=neuron", *SHORT, "device_map=stream", "generate.max_new_tokens=2"), 4, 2),
        (
            (
                *CPU,
                "kind=candidate",
                "inputs=random",
                "seq_len=5",
                "scope=range",
                "start=0",
                "end=3",
            ),
            1,
            3,
        ),
        ((*CPU, *SHORT, "port=fault", "port.name=qk_norm_skipped", "kind=candidate"), 6, 1),
    ],
)
def test_a_resumed_run_is_bit_equal(cli: Cli, stopping, tmp_path, words, notes, resumed) -> None:
    whole = cli(*words, "tracking.folder=whole")
    assert whole.exit == 0, whole.err
    words = (*words, "tracking.folder=stopped")
    stopping(notes)
    assert cli(*words).exit == 130
    for _ in range(resumed - 1):
        stopping(notes)
        ended = cli(*words, "resume=true")
        assert ended.exit == 130 and "Resuming run " in ended.out, ended.err
    stopping(None)
    ended = cli(*words, "resume=true")
    assert ended.exit == 0, ended.err
    assert "Resuming run " in ended.out
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    left = [path for path in (tmp_path / "stopped").rglob(".*") if path.is_dir()]
    assert left == [], "what was noted is gone"


def test_what_sliding_windows_cached_is_put_back(cli: Cli, stopping, tmp_path) -> None:
    """gpt-oss: every other block sees a window, which the prompt fills and decoding moves on."""
    model = Path(shutil.copytree(ROOT / "tests/masters/models/gpt_oss", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 4}))
    save_random(model)
    (tmp_path / "tokens.json").write_text("[[5, 6, 7, 8, 9, 10]]")
    words = (*CPU, "model=checkpoint", f"model.path={model}", "inputs=tokens",
             "inputs.file=tokens.json", "generate.max_new_tokens=4", "kind=candidate")  # fmt: skip
    assert cli(*words, "tracking.folder=whole").exit == 0
    stages = int(config["num_hidden_layers"]) + 3
    stopping(stages + 3)
    assert cli(*words, "tracking.folder=stopped").exit == 130
    stopping(None)
    ended = cli(*words, "tracking.folder=stopped", "resume=true")
    assert ended.exit == 0 and "after decode.2" in ended.out, ended.err
    assert f"blocks and tokens: {stages + 3} of {stages + 3} token 4" in ended.out.splitlines()
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def save_random(folder: Path) -> None:
    """Save random weights for a model whose configuration is in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)


# ---------------------------------------------------------------- nothing to go on from


def stopped_after_one(cli: Cli, stopping) -> Path:
    stopping(1)
    assert cli(*TWO).exit == 130
    stopping(None)
    (folder,) = Path("mlruns/artifacts").glob("*/artifacts")
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def other_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "harm", "says"),
    [
        ("tensors/embed_tokens.safetensors", other_bytes, "its bytes are not those"),
        ("tensors/embed_tokens.safetensors", Path.unlink, "is missing"),
        (".progress/state.0.safetensors", other_bytes, "its bytes are not those"),
        (".progress/journal", cut, "it notes no finished stage"),
        (".progress/journal", Path.unlink, "it left nothing to go on from"),
    ],
)
def test_what_is_damaged_is_not_resumed(cli: Cli, stopping, file: str, harm, says: str) -> None:
    harm(stopped_after_one(cli, stopping) / file)
    ended = cli(*TWO, "resume=true")
    assert ended.exit == 0, ended.err
    (line,) = [each for each in ended.out.splitlines() if "is not resumed" in each]
    assert line.startswith("note: run candidate-tiny_minimax_m2-single-0-float32-cpu (")
    assert ANEW in ended.out
    assert says in line
    assert "Resuming" not in ended.out


def test_it_is_said_where_no_run_was_interrupted(cli: Cli) -> None:
    for _ in range(2):
        ended = cli(*TWO, "resume=true")
        assert ended.exit == 0, ended.err
        assert ANEW in ended.out and "is not resumed" not in ended.out


def test_a_port_that_reads_something_else_by_now_does_not_go_on(cli: Cli, stopping) -> None:
    Path("reading_port.py").write_text(
        "from pathlib import Path\n"
        "from layerparity.ports.known.hf import HfPort\n"
        "class Port(HfPort):\n"
        "    def load(self, stage):\n"
        "        Path('scale.txt').read_text()\n"
        "        return super().load(stage)\n"
    )
    Path("scale.txt").write_text("1")
    words = (*TWO, "port._target_=reading_port.Port")
    stopping(1)
    assert cli(*words).exit == 130
    stopping(1)
    ended = cli(*words, "resume=true")
    assert ended.exit == 130 and "Resuming run " in ended.out, ended.err
    stopping(None)
    Path("scale.txt").write_text("2")
    ended = cli(*words, "resume=true")
    assert ended.exit == 0, ended.err
    assert "Resuming run " not in ended.out
    assert (
        f"is not resumed: of what its port loaded, {Path.cwd() / 'scale.txt'} has changed"
        in ended.out
    )


def test_other_threads_do_not_go_on(cli: Cli, stopping) -> None:
    stopped_after_one(cli, stopping)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        ended = cli(*TWO, "resume=true")
    finally:
        torch.set_num_threads(before)
    assert "it was computed on another processor, or with other threads" in ended.out


def test_a_folder_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """A store that somebody else made may name any folder as a run's."""
    store = fresh_store(tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt), store.start("mine", "golden", {"fingerprint": "f"}, {}):
        raise KeyboardInterrupt
    (run,) = store.unfinished("f")
    assert store.own_folder(run) == run.folder
    for elsewhere in (tmp_path, run.folder.parent, store.config.root):
        with pytest.raises(UserError, match="is not the store's own"):
            store.own_folder(replace(run, locate=elsewhere.joinpath))
    folder = run.folder
    folder.rename(tmp_path / "mine")
    folder.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is not the store's own"):
        store.own_folder(run)


def test_runs_before_a_finished_one_are_not_asked(tmp_path: Path) -> None:
    store = fresh_store(tmp_path)
    for ends in (ValueError, None, KeyboardInterrupt, ValueError):
        try:
            with store.start(f"{ends}", "golden", {"fingerprint": "f"}, {}):
                if ends is not None:
                    raise ends
        except (ValueError, KeyboardInterrupt):
            pass
    alive = store.begin("alive", "golden", {"fingerprint": "f"}, {})
    names = [run.name for run in store.unfinished("f")]
    assert names == [str(ValueError), str(KeyboardInterrupt)]
    alive.end()
    assert store.unfinished("f") == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("tracking=server", "tracking.uri=http://127.0.0.1:1"),
            "an interrupted run for a server leaves no files",
        ),
        (("tp_degree=2", "backend=neuron"), "split over devices (tp_degree=2)"),
    ],
)
def test_what_leaves_nothing_is_not_resumed(cli: Cli, words, says: str) -> None:
    ended = cli(*TWO[2:], *words, "resume=true")
    assert ended.exit == 2
    assert says in ended.err
    assert not Path("mlruns").exists()


# ---------------------------------------------------------------- the journal


def finished(name: str) -> FinishedStage:
    return FinishedStage(name, [], [], [], {name: "1"}, {}, {}, {}, [], {})


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    here = Circumstances("f", 1, "p")
    writer = ProgressWriter(tmp_path, here)
    values = [torch.arange(4.0) + n for n in range(3)]
    writer.add(finished("a"), ["x"], {"x": values[0], "y": values[1]})
    writer.add(finished("b"), ["x"], {"x": values[1]})
    journal = tmp_path / ".progress" / "journal"
    whole = journal.read_bytes()
    for more in (b"abc", whole[:-20], whole, b"\xff\n"):
        journal.write_bytes(whole + more)
        read = read_progress(tmp_path)
        assert [each.name for each in read.stages] == ["a", "b"]
        assert torch.equal(read.state()["x"], values[1])
        assert torch.equal(read.cache(0)["y"], values[1])
    again = ProgressWriter(tmp_path, here, read)
    again.add(finished("c"), ["x"], {"x": values[2]})
    read = read_progress(tmp_path)
    assert [each.name for each in read.stages] == ["a", "b", "c"]
    assert read.circumstances == here
    assert torch.equal(read.state()["x"], values[2])
    kept = sorted(path.name for path in journal.parent.iterdir())
    assert kept == ["cache.0.safetensors", "journal", "state.2.safetensors"]
    # A line that is missing in between hides what comes after it.
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(UserError, match="it notes no finished stage"):
        read_progress(tmp_path)


def test_nothing_is_noted_after_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    from layerparity.record.recorder import Recorder

    recorder, done = Recorder(tmp_path), []

    def refused(_: object) -> None:
        raise UserError("the disk is full", "make room")

    with pytest.raises(UserError, match="the disk is full"):
        for work in (done.append, refused, done.append):
            recorder.then({"x": torch.zeros(1)}, work)
        recorder.finish()
    recorder.stop()
    assert len(done) == 1


# ---------------------------------------------------------------- several at once


def slowly(*words: str) -> None:
    """Be a command that after a note waits for so many who find its lock; or that dies there."""
    from layerparity.cli.door import main

    add, (doomed, others, *words) = ProgressWriter.add, words

    class Told(reuse.FileLock):
        def acquire(self, *given: Any, **more: Any) -> Any:
            try:
                return super().acquire(*given, **more)
            except Timeout:
                Path(f"told-{os.getpid()}").touch()
                raise

    def slow(*arguments) -> None:
        add(*arguments)
        if doomed == "doomed":
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 200
        while len(list(Path().glob("told-*"))) < int(others) and time.monotonic() < deadline:
            time.sleep(0.02)

    ProgressWriter.add, reuse.FileLock = slow, Told
    sys.argv = ["run.py", *words]
    sys.exit(int(main()))


def together(folder: Path, count: int, *words: str) -> list[Done]:
    """Start so many commands, of which one waits for the others; return how each ended."""
    words = (words[0], str(count - 1), *words[1:])
    tasks = [Task(words, folder, call=slowly) for _ in range(count)]
    return [child.wait() for child in [Child(task) for task in tasks]]


def test_three_that_reuse_make_one_run(tmp_path: Path) -> None:
    fresh_config(tmp_path / "reused")
    ended = together(tmp_path, 3, "whole", *TWO, "tracking.folder=reused", "reuse=true")
    assert [each.status for each in ended] == [0, 0, 0], ended
    said = [each.out + each.err for each in ended]
    (run,) = open_store(TrackingConfig(folder=str(tmp_path / "reused"))).runs()
    assert sum(f"Reusing run {run.name} ({run.id})" in each for each in said) == 2
    assert sum("another command makes this very run: it is waited for" in e for e in said) == 2


def test_of_two_that_resume_one_goes_on(tmp_path: Path) -> None:
    fresh_config(tmp_path / "resumed")
    words = (*TWO, "tracking.folder=resumed")
    (killed,) = together(tmp_path, 1, "doomed", *words)
    assert killed.status == -signal.SIGKILL, killed
    ended = together(tmp_path, 2, "whole", *words, "resume=true")
    lost, won = sorted(ended, key=lambda each: -(each.status or 0))
    assert (won.status, lost.status) == (0, 2), ended
    assert "Resuming run candidate-tiny_minimax_m2-single-0-float32-cpu" in won.out
    assert "after embed_tokens" in won.out
    assert "layerparity: Another command makes or resumes this very run (same finger" in lost.err
    stored = open_store(TrackingConfig(folder=str(tmp_path / "resumed"))).runs()
    runs = {run.status: run for run in stored}
    assert sorted(run.status for run in stored) == ["FINISHED", "INTERRUPTED"]
    old, new = runs["INTERRUPTED"], runs["FINISHED"]
    assert (new.tags["resumed"], old.tags["resumed_by"]) == (old.id, new.id)


def test_without_locks_only_one_takes_the_files(tmp_path: Path) -> None:
    store = fresh_store(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.start("old", "golden", {"fingerprint": "f"}, {}):
        raise KeyboardInterrupt
    (old,) = store.unfinished("f")
    folder = old.folder
    (folder / "mine").write_text("")
    with store.start("new", "golden", {}, {}) as first:
        first.take_over(old, folder)
        assert (first.folder / "mine").exists() and not folder.exists()
        with (
            pytest.raises(UserError, match="another command may go on"),
            store.start("other", "golden", {}, {}) as second,
        ):
            second.take_over(old, folder)
