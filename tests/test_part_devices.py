"""Devices of a sweep's parts: each process takes its own, as many as a part wants, side by side."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerparity.backends.base import Abilities, DeviceShare
from layerparity.backends.known import gpu
from layerparity.ground.errors import UserError
from layerparity.machine import nvidia
from layerparity.making import endings, part_devices
from layerparity.ports.opening import open_backend
from layerparity.settings.config import Config, DeviceMapSettings

VARIABLE = "SOME_VISIBLE_DEVICES"
Take = Callable[[int], str | None]


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Take]:
    """Take so many of four devices for a part; return what this process is shown of them."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv(endings.VARIABLE, str(tmp_path))
    monkeypatch.setattr(part_devices, "_held", {})
    monkeypatch.setattr(part_devices.time, "sleep", _no_waiting)

    def taken(count: int) -> str | None:
        share = DeviceShare(VARIABLE, ["0", "1", "2", "3"], count)
        able = Abilities(share=lambda config: share)
        monkeypatch.setattr(open_backend, "abilities", lambda config: able)
        part_devices.take(Config())
        return os.environ[VARIABLE]

    yield taken
    for _, locks in part_devices._held.values():
        for lock in locks:
            os.close(lock)


def _no_waiting(seconds: float) -> None:
    raise TimeoutError("all devices are held")


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Callable[[str], bool]]:
    """Lock a device as another process does; False where somebody has it."""
    handles = []

    def lock(device: str) -> bool:
        path = tmp_path / f"{socket.gethostname()}-{VARIABLE}-{device}.lock"
        handles.append(os.open(path, os.O_RDWR | os.O_CREAT))
        try:
            fcntl.flock(handles[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    yield lock
    for handle in handles:
        os.close(handle)


def test_a_process_takes_the_first_that_nobody_holds(take: Take, others: Any) -> None:
    assert others("0")
    assert take(1) == "1"
    assert not others("1") and others("2")


def test_a_group_is_taken_whole_and_what_was_tried_is_given_back(take: Take, others: Any) -> None:
    assert others("1")
    assert take(2) == "2,3"
    # Half a group is of no use to this process, and may be all that another one wants.
    assert others("0")


def test_groups_begin_at_multiples_of_their_size(take: Take, others: Any) -> None:
    assert others("0")
    assert take(2) == "2,3"


def test_who_finds_none_waits(take: Take, others: Any, capsys: Any) -> None:
    assert others("0") and others("2")
    with pytest.raises(TimeoutError):
        take(2)
    assert f"waits until another part gives back {VARIABLE}" in capsys.readouterr().out


def test_a_later_part_has_what_the_process_holds_and_no_more(take: Take) -> None:
    assert take(2) == "0,1"
    assert take(1) == take(2) == "0,1"
    with pytest.raises(UserError, match="wants 3 devices, and its process took 2"):
        take(3)


def test_slurm_and_a_sweep_of_one_process_give_out_nothing(
    take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert take(1) == ""
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv(endings.VARIABLE)
    assert take(1) == ""


@pytest.mark.parametrize(
    ("strategy", "degree", "count"),
    [("cuda:0", 1, 1), ("stream", 1, 1), ("balanced", 1, 0), ("cpu", 1, 0), ("cuda:0", 2, 0)],
)
def test_a_run_that_asks_for_one_gpu_shares_them(
    monkeypatch: pytest.MonkeyPatch, strategy: str, degree: int, count: int
) -> None:
    monkeypatch.setattr(nvidia, "visible_gpus", lambda: ["0", "1"])
    share = gpu.abilities(gpu.Settings()).share
    assert share is not None
    asked = share(Config(device_map=DeviceMapSettings(strategy), tp_degree=degree))
    assert asked == (DeviceShare(nvidia.VISIBLE, ["0", "1"], count) if count else None)
