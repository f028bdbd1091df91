"""The cache of what was fetched from a server, or unpacked: limited, and never what is in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerparity.machine import owner
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import fetched, in_use

IDS = [digit * 32 for digit in "abc"]
KILOBYTE = 1000


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "_fetched", {})
    monkeypatch.setattr(fetched, "_told", set())


def kept(root: Path, entry: str, used: int, kind: str = "files") -> Path:
    """Write an entry of 1 kB, last used at a time."""
    folder = fetched.folder(root) / kind / entry
    (folder / "tensors").mkdir(parents=True)
    (folder / "tensors" / "layers.0.safetensors").write_bytes(b"x" * KILOBYTE)
    os.utime(folder, (used, used))
    return folder


def each_kept(root: Path, *used: int) -> list[Path]:
    """Write an entry for each time."""
    return [kept(root, entry, at) for entry, at in zip(IDS, used, strict=False)]


def config(root: Path, kilobytes: float) -> TrackingConfig:
    return TrackingConfig(folder=str(root), cache_gb=kilobytes / 1e6)


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    old, older, new = (
        kept(tmp_path, entry, at) for entry, at in zip(IDS, (20, 10, 30), strict=True)
    )
    tensors = kept(tmp_path, IDS[1], 10, "tensors")
    fetched.make_room(config(tmp_path, 2.5), 0)
    assert [each.exists() for each in (old, older, tensors, new)] == [True, False, False, True]
    assert not list(fetched.folder(tmp_path).glob(f"{owner.prefix('evicted')}*"))


def test_what_is_used_is_the_newest(tmp_path: Path) -> None:
    first, second = each_kept(tmp_path, 10, 20)
    holder = "import sys; from pathlib import Path; from layerparity.tracking import fetched; "
    holder += "fetched.use(Path(sys.argv[1]), sys.argv[2])"
    subprocess.run([sys.executable, "-c", holder, str(tmp_path), IDS[0]], check=True)
    fetched.make_room(config(tmp_path, 1.5), 0)
    assert first.exists() and not second.exists()


def test_what_a_process_uses_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By another process, and by this one; then the limit is broken, and once said."""
    theirs, ours, nobodys = (
        kept(tmp_path, entry, at) for entry, at in zip(IDS, (1, 2, 3), strict=True)
    )
    holder = "import sys; from pathlib import Path; from layerparity.tracking import fetched; "
    holder += "fetched.use(Path(sys.argv[1]), sys.argv[2]); print('held', flush=True); input()"
    command = [sys.executable, "-c", holder, str(tmp_path), IDS[0]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        fetched.use(tmp_path, IDS[1])
        for _ in range(2):
            fetched.make_room(config(tmp_path, 0.5), KILOBYTE)
        assert theirs.exists() and ours.exists() and not nobodys.exists()
        assert capsys.readouterr().out.count("more in") == 1
        process.communicate("\n")
    fetched.make_room(config(tmp_path, 0.5), KILOBYTE)
    assert not theirs.exists() and ours.exists()


def test_two_processes_may_bring_one_folder_at_the_same_moment(tmp_path: Path) -> None:
    """Each sees that it is not there yet, and one is quicker: neither fails."""
    brought = [tmp_path / "mine", tmp_path / "theirs"]
    for each in brought:
        each.mkdir()
        (each / "file").write_text("the same")
        fetched.put(each, tmp_path / "runs")
    assert (tmp_path / "runs" / "file").read_text() == "the same"
    with pytest.raises(OSError, match="No such file"):
        fetched.put(tmp_path / "nothing", tmp_path / "elsewhere")


def test_what_a_killed_process_put_aside_is_nobodys(tmp_path: Path) -> None:
    kept(tmp_path, IDS[0], 10)
    killed = "import os, sys; from pathlib import Path; from layerparity.tracking import fetched; "
    killed += "fetched.shutil.rmtree = lambda *a, **k: os._exit(9); "
    killed += "fetched._remove(Path(sys.argv[1]), sys.argv[2])"
    ended = subprocess.run([sys.executable, "-c", killed, str(tmp_path), IDS[0]], check=False)
    assert ended.returncode == 9
    cache = fetched.folder(tmp_path)
    assert not (cache / "files" / IDS[0]).exists(), "whole or not at all"
    assert [path for path in cache.iterdir() if path.name.startswith(".") or "evicted" in path.name]
    owner.remove_abandoned(cache)
    assert [path.name for path in cache.iterdir()] == ["files"]
    assert in_use.take(tmp_path, IDS[0]), "its lock went with it"
