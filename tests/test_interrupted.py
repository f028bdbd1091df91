"""Interrupted runs: real processes, killed or signalled at several moments; none stays RUNNING."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT
from stores import fresh_config, fresh_store

from layerparity.machine import owner
from layerparity.tracking import interrupted
from layerparity.tracking.opening import open_store
from layerparity.tracking.process import terminable, unhidden

# A run that stops at a moment, says so, and waits for its end there.
PROGRAM = """
import os, signal, sys, time
from layerparity.ground.files import whole_file, write_text
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

folder, moment = sys.argv[1:]
# Whoever runs the tests under nohup ignores it, and what is ignored stays so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
store = open_store(TrackingConfig(folder=folder))

def stand(here, at=None):
    if here == moment:
        print("here", at or "", flush=True)
        for _ in range(6000):
            time.sleep(0.1)

parent = store.begin("the sweep", "sweep", {}, {})
stand("parent", parent.id)
with store.start("the run", "golden", {}, {}, parent=parent.id) as run:
    stand("begun", run.id)
    write_text(run.folder / "whole.json", "{}")
    write_text(run.folder / "tensors" / "0.json", "{}")
    with whole_file(run.folder / "tensors" / "1.json") as part:
        part.write_text("half")
        stand("writing", run.id)
    run.log_metrics([("layer/x", 1.0, 0)])
    stand("ending", run.id)
"""
MOMENTS = ("parent", "begun", "writing", "ending")


def started(folder, moment):
    """Start the program; return it when it stands at its moment."""
    command = [sys.executable, "-c", PROGRAM, str(folder), moment]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline().startswith("here"), child.stderr.read()
    return child


def raw(store, run):
    return store._connection.client.get_run(run.id)


def statuses(store):
    return {run.name: raw(store, run).info.status for run in store.runs()}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_next_command_ends_what_was_killed(moment, tmp_path, capsys):
    config = fresh_config(tmp_path)
    with started(tmp_path, moment) as child:
        assert set(statuses(open_store(config)).values()) == {"RUNNING"}, "it is alive"
        child.kill()
    assert capsys.readouterr().out == ""
    store = open_store(config)
    said = capsys.readouterr().out.splitlines()
    runs = store.runs()
    assert statuses(store) == {run.name: "KILLED" for run in runs}
    assert len(runs) == (1 if moment == "parent" else 2)
    for run in runs:
        assert run.status == "INTERRUPTED"
        assert run.tags["interrupted"] == "true"
        assert run.tags["error"] == "interrupted: its process is gone"
        (line,) = [each for each in said if run.id[:8] in each]
        assert line == (
            f"note: run {run.name} ({run.id[:8]}) was interrupted (its process is gone): "
            "it is marked so"
        )
    assert len(said) == len(runs)
    open_store(config)
    assert capsys.readouterr().out == "", "it was said"


def test_half_files_go_and_whole_ones_stay(tmp_path):
    config = fresh_config(tmp_path)
    with started(tmp_path, "writing") as child:
        (folder,) = (tmp_path / "artifacts").glob("*/artifacts/tensors")
        (half,) = folder.glob(".1.json.*.part")
        (folder / ".hidden").write_text("mine")
        (folder / "x.part").write_text("mine")
        open_store(config)
        assert half.exists(), "its process writes to it"
        child.kill()
    open_store(config)
    left = sorted(path.name for path in folder.parent.rglob("*.*") if path.is_file())
    assert left == [".hidden", "0.json", "whole.json", "x.part"]


def test_nothing_outside_the_store_is_removed(tmp_path):
    """A store that somebody else made may name any folder as a run's."""
    config = fresh_config(tmp_path / "runs")
    with started(tmp_path / "runs", "begun") as child:
        child.kill()
    outside = tmp_path / "home"
    outside.mkdir()
    mine = outside / ".notes.txt.abcd1234.part"
    mine.write_text("mine")
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as base:
        base.execute("UPDATE runs SET artifact_uri = ?", (outside.as_uri(),))
    base.close()
    store = open_store(config)
    assert set(statuses(store).values()) == {"KILLED"}
    assert mine.exists()


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, "begun"),
        (signal.SIGHUP, "begun"),
        (signal.SIGHUP, "writing"),
        (signal.SIGINT, "writing"),
        (signal.SIGINT, "ending"),
    ],
)
def test_a_signal_ends_the_run_itself(number, moment, tmp_path):
    config = fresh_config(tmp_path)
    with started(tmp_path, moment) as child:
        child.send_signal(number)
        child.communicate(timeout=200)
    expected = -number if number == signal.SIGINT else 128 + number
    assert child.returncode == expected
    store = open_store(config)
    runs = {run.name: run for run in store.runs()}
    assert runs["the run"].status == "KILLED"
    called = "Ctrl-C" if number == signal.SIGINT else number.name
    assert runs["the run"].tags["error"] == f"stopped by {called}"
    assert list(tmp_path.rglob("*.part")) == []


def test_what_is_ignored_stays_ignored():
    """As under nohup."""
    program = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "from layerparity.tracking.process import terminable\n"
        "with terminable(): os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('went on')"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "went on\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_where_nothing_can_be_raised(number, monkeypatch):
    """Python prints what is raised in a finaliser, and goes on as if nothing had been."""

    class Finalised:
        def __del__(self):
            signal.raise_signal(number)

    others = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    stop = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(stop), terminable():
        Finalised()
        time.sleep(5)
    assert others == []
    # What is somebody else's is handed on.
    with terminable():
        Failing()
    assert [type(each.exc_value) for each in others] == [ZeroDivisionError]


class Signalled:
    """A lock at whose taking or giving back a signal comes, as it may come at any step."""

    def __init__(self, number: int, at: str) -> None:
        self.lock, self.number, self.at = threading.Lock(), number, at
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def __enter__(self) -> None:
        self.lock.acquire()
        self.come("__enter__")

    def __exit__(self, *_: object) -> None:
        self.come("__exit__")
        self.lock.release()

    def come(self, at: str) -> None:
        if at == self.at:
            self.at = ""
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_not_hidden_by_what_fails_on_the_way_out(number):
    """As where OmegaConf gives back a flag that it had no time to take."""

    def fails():
        try:
            os.kill(os.getpid(), number)
        finally:
            raise AttributeError

    stop = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(stop), terminable(), unhidden():
        fails()
    with pytest.raises(ValueError, match="a port's own"), terminable(), unhidden():
        try:
            raise SystemExit(1)
        except SystemExit as error:
            raise ValueError("a port's own") from error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("at", ["__enter__", "__exit__"])
def test_a_signal_leaves_no_lock_taken(number, at):
    """Else the thread that ends what is waited for waits itself, and the command with it."""
    lock = Signalled(number, at)
    condition = threading.Condition(lock)
    stop = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(stop), terminable():
        with condition:
            pass
        time.sleep(5)
    assert not lock.lock.locked()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_a_lock_for_ever_can_be_ended(number):
    """As a thread holds it that writes to a terminal that was stopped."""
    lock = threading.Lock()
    lock.acquire()
    condition = threading.Condition(lock)
    stop = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, number)).start()
    with pytest.raises(stop), terminable(), condition:
        pass


STARTED = """
import signal, threading
from concurrent.futures import ThreadPoolExecutor
from layerparity.tracking.process import terminable

wait = threading.Event.wait

def interrupted(event, timeout=None):
    threading.Event.wait = wait
    wait(event, timeout)
    signal.raise_signal(signal.SIGHUP)

with terminable(for_good=True):
    pool = ThreadPoolExecutor(1)
    threading.Event.wait = interrupted  # Of the thread that a pool starts.
    pool.submit(print, "done").result()
    wait(threading.Event(), 60)
"""


def test_a_signal_while_a_pool_starts_its_thread_ends_the_process():
    """Else Python waits at its end for a thread that nobody told to end."""
    command = [sys.executable, "-c", STARTED]
    ended = subprocess.run(command, timeout=200, text=True, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGHUP, "done\n")


class Failing:
    def __del__(self):
        raise ZeroDivisionError


COMMAND = (
    "backend=gpu", "device_map=cpu", "scope=full", "inputs=prompt", "name=mine",
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "times", "status"), [(signal.SIGINT, 5, 130), (signal.SIGHUP, 2, 129)]
)
def test_five_quick_ctrl_c_end_a_command_as_one(number, times, status, tmp_path):
    config = fresh_config(tmp_path / "mlruns")
    command = [sys.executable, str(ROOT / "run.py"), *COMMAND]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    environment["PYTHONFAULTHANDLER"] = "1"
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        until(lambda: list(tmp_path.glob("mlruns/artifacts/*/artifacts/tensors/*")))
        for _ in range(times):
            child.send_signal(number)
            time.sleep(0.05)
        said = ended(child)
    assert child.returncode == status, said
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("layerparity:")]
    assert len(lines) == (1 if number == signal.SIGINT else 0)
    (run,) = open_store(config).runs()
    assert run.status == "KILLED"
    assert list(tmp_path.glob("layerparity-*")) == []


def ended(child):
    """Return what a process said on stderr until it ended; one that hangs says where."""
    try:
        return child.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)
        raise AssertionError(child.communicate(timeout=60)[1]) from None


def until(done, seconds=120):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert done()


# Of a process that cannot be seen from here.


@pytest.fixture
def store(tmp_path):
    return fresh_store(tmp_path)


def elsewhere(store, run, silent):
    """Let a run be of another machine, ``silent`` seconds ago last heard of."""
    client, prefix = store._connection.client, "layerparity."
    client.set_tag(run.id, f"{prefix}owner", "elsewhere/1/2:17:1")
    client.set_tag(run.id, f"{prefix}heartbeat", str(int(time.time() - silent)))
    # It began before that.
    with sqlite3.connect(store.config.root / "mlflow.db") as base:
        base.execute("UPDATE runs SET start_time = ?", (int(time.time() - silent - 1) * 1000,))
    base.close()


@pytest.mark.parametrize(
    ("silent", "ended"), [(14 * 60, False), (16 * 60, True), (-14 * 60, False), (-16 * 60, True)]
)
def test_another_machines_run_has_fifteen_minutes(silent, ended, store, capsys):
    run = store.begin("far", "golden", {}, {})
    elsewhere(store, run, silent)
    half, old = run.folder / ".x.bin.abcd1234.part", run.folder / ".y.bin.abcd1234.part"
    for path in (half, old):
        path.write_text("half")
    os.utime(old, (time.time() - 3600,) * 2)
    open_store(store.config)
    assert statuses(store) == {"far": "KILLED" if ended else "RUNNING"}
    assert ("nothing was heard of it for 15 minutes" in capsys.readouterr().out) is ended
    assert half.exists(), "it may be alive after all"
    assert old.exists() is not ended


def test_a_run_that_began_by_a_wrong_clock_lives_as_long_as_it_is_heard(store):
    run = store.begin("far", "golden", {}, {})
    elsewhere(store, run, 60)
    with sqlite3.connect(store.config.root / "mlflow.db") as base:
        base.execute("UPDATE runs SET start_time = start_time + 315360000000")
    base.close()
    open_store(store.config)
    assert statuses(store) == {"far": "RUNNING"}


def test_a_run_that_was_taken_for_dead_and_goes_on_is_finished(store):
    with store.start("slow", "golden", {}, {}) as run:
        elsewhere(store, run, 3600)
        open_store(store.config)
        assert store.get(run.id).status == "INTERRUPTED"
        run.log_metrics([("layer/x", 1.0, 0)])
    found = store.get(run.id)
    assert found.status == "FINISHED" and raw(store, run).info.status == "FINISHED"
    assert "interrupted" not in found.tags and "error" not in found.tags


def test_one_that_goes_on_and_fails_keeps_its_own_error(store):
    with pytest.raises(ValueError), store.start("slow", "golden", {}, {}) as run:
        elsewhere(store, run, 3600)
        open_store(store.config)
        raise ValueError("its own")
    found = store.get(run.id)
    assert (found.status, found.tags["error"]) == ("FAILED", "ValueError: its own")
    assert "interrupted" not in found.tags


def test_an_open_run_says_that_it_lives(store, monkeypatch):
    monkeypatch.setattr(interrupted, "BEAT_SECONDS", 0.05)
    with store.start("alive", "golden", {}, {}) as run:
        elsewhere(store, run, 3600)
        until(lambda: time.time() - float(store.get(run.id).tags["heartbeat"]) < 60)
        assert store.get(run.id).status == "RUNNING"
    before = store.get(run.id).tags["heartbeat"]
    time.sleep(1.5)
    assert store.get(run.id).tags["heartbeat"] == before, "it beats after its end"


def test_runs_that_are_not_ours_are_left(store):
    client = store._connection.client
    client.create_run(store._connection.experiment_id, start_time=1)
    open_store(store.config)
    (run,) = store.runs()
    assert raw(store, run).info.status == "RUNNING"


def test_the_tag_tells_containers_apart():
    host, boot, namespace = owner.place().split("/")
    if Path("/proc/self/ns/pid").exists():
        assert boot and namespace.isdecimal()
    assert owner.owner_tag().startswith(f"{host}/{boot}/{namespace}:{os.getpid()}:")
