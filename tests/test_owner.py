"""Owners: a process that is gone is told from one that runs or is not seen; its folders go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from layerparity.machine import owner
from layerparity.tracking.process import terminable

SLEEPER = (sys.executable, "-c", "import time; print(flush=True); time.sleep(600)")
MAKER = """
import sys, tempfile, time
from layerparity.machine import owner
tempfile.tempdir = sys.argv[1]
with owner.temporary() as one, owner.temporary("selftest") as two:
    print(flush=True)
    time.sleep(600)
"""


def tag_of(child):
    return f"{owner.place()}:{child.pid}:{owner.start_of(child.pid)}"


def test_a_killed_process_is_told_from_a_running_one():
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        tag = tag_of(child)
        assert owner.has_ended(tag) is False
        child.kill()
        # Not yet waited for: a zombie is gone as well.
        deadline = time.monotonic() + 120
        while not owner.has_ended(tag) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert owner.has_ended(tag)
    assert owner.has_ended(tag)
    assert owner.has_ended(owner.owner_tag()) is False
    assert owner.has_ended(f"{owner.owner_tag()}9"), "same pid, another start"


@pytest.mark.parametrize("change", ["host", "boot", "namespace"])
def test_of_another_place_nothing_is_known(change):
    parts = dict(zip(("host", "boot", "namespace"), owner.place().split("/"), strict=True))
    elsewhere = "/".join({**parts, change: "other"}.values())
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as child:
        start = owner.start_of(child.pid)
        child.kill()
    assert owner.has_ended(f"{elsewhere}:{child.pid}:{start}") is None
    assert owner.has_ended(f"{owner.place()}:{'9' * 5000}:1") is None


def test_a_process_that_is_not_shown_is_not_taken_for_dead(monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    tag = f"{owner.place()}:{2**22 + 5}:77"
    assert owner.has_ended(tag)
    monkeypatch.setattr(owner.os, "kill", refuse)
    assert owner.has_ended(tag) is None


def test_the_folders_of_a_killed_process_are_removed_and_no_others(tmp_path):
    command = [sys.executable, "-c", MAKER, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as killed,
        subprocess.Popen(command, stdout=subprocess.PIPE) as alive,
    ):
        killed.stdout.readline()
        alive.stdout.readline()
        made = {path.name for path in tmp_path.iterdir()}
        theirs = {name for name in made if f"-{killed.pid}-" in name}
        assert (len(made), len(theirs)) == (4, 2)
        (tmp_path / sorted(theirs)[0] / "weights.bin").write_bytes(b"x")
        killed.kill()
        killed.wait()
        like = sorted(theirs)[0]
        other = like.replace(owner.prefix().split("-")[1], "0" * 12)
        kept = {"layerparity-mine", "layerparity-offload-old", other, "my-notes"}
        for name in kept:
            (tmp_path / name).mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / f"{like}x").symlink_to(tmp_path / "elsewhere")
        kept |= {"elsewhere", f"{like}x"}
        assert {path.name for path in owner.remove_abandoned(tmp_path)} == theirs
        assert {path.name for path in tmp_path.iterdir()} == kept | (made - theirs)
        assert owner.remove_abandoned(tmp_path) == []
        alive.kill()


def test_the_folders_of_another_user_are_left(tmp_path, monkeypatch):
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as child:
        name = owner.prefix().replace(
            f"-{owner.os.getpid()}-{owner.start_of(owner.os.getpid())}-",
            f"-{child.pid}-{owner.start_of(child.pid)}-",
        )
        child.kill()
    (tmp_path / f"{name}abc").mkdir()
    monkeypatch.setattr(owner.os, "getuid", lambda: 12345)
    assert owner.remove_abandoned(tmp_path) == []
    monkeypatch.undo()
    assert [path.name for path in owner.remove_abandoned(tmp_path)] == [f"{name}abc"]


def test_a_command_removes_what_a_killed_one_left(cli, tmp_path, monkeypatch):
    with subprocess.Popen([*SLEEPER[:2], MAKER, str(tmp_path)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.kill()
    left = list(tmp_path.glob("layerparity-*"))
    assert len(left) == 2
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cli("job=ui", "job.port=0")
    assert list(tmp_path.glob("layerparity-*")) == []


@pytest.mark.parametrize("moment", ["mkdir", "rmtree"])
def test_a_signal_at_its_making_or_its_end_leaves_no_folder(moment, tmp_path, monkeypatch):
    module, signals = (os, shutil)[moment == "rmtree"], [signal.SIGTERM]
    whole = getattr(module, moment)

    def interrupted(*arguments, **keys):
        if moment == "mkdir":
            whole(*arguments, **keys)
        if signals:
            signal.raise_signal(signals.pop())
        if moment == "rmtree":
            whole(*arguments, **keys)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, moment, interrupted)
    with pytest.raises(SystemExit), terminable(), owner.temporary():
        pass
    assert signals == [] and list(tmp_path.iterdir()) == []
