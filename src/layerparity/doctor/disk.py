"""Disk: room for runs in the tracking folder, and how fast it gives them back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.doctor._machine import nearest_folder
from layerparity.doctor._reading import speed_of_folder
from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.ground.console import bytes_text
from layerparity.settings.tracking import read_config

if TYPE_CHECKING:
    from layerparity.settings.config import Config

SAMPLE = 128 << 20
_TOO_LITTLE = 1e9
_LITTLE = 20e9
_SLOW = 100e6
_IN_MEMORY = ("tmpfs", "ramfs")
_CURE = "make room, or choose another folder with tracking.folder=FOLDER"


def look(config: Config) -> Iterator[Result]:
    """Yield a line for the room, and one for the speed, measured by a file that is removed."""
    root = read_config(config.tracking).root
    folder = nearest_folder(root)
    if not folder.is_dir():
        yield problem("disk", f"{folder} is a file", "choose another with tracking.folder=FOLDER")
        return
    free = shutil.disk_usage(folder).free
    found = f"{bytes_text(free)} free at {root}"
    kind = _kind(folder)
    if free < _TOO_LITTLE:
        yield problem("disk", found, _CURE)
        return
    if kind in _IN_MEMORY:
        cure = "choose a folder on a disk with tracking.folder=FOLDER"
        yield warning("disk", f"{found}, which is memory ({kind}): runs are lost with it", cure)
    elif free < _LITTLE:
        yield warning("disk", found, _CURE)
    else:
        yield ok("disk", found)
    yield _speed(folder)


def _speed(folder: Path) -> Result:
    try:
        speed = speed_of_folder(folder, SAMPLE)
    except OSError as error:
        found = f"{folder} cannot be written to ({os.strerror(error.errno or 0)})"
        cure = "change its permissions, or choose another with tracking.folder=FOLDER"
        return problem("disk speed", found, cure)
    found = f"reads {speed / 1e9:.2f} GB/s ({bytes_text(SAMPLE)} not in memory)"
    if speed < _SLOW:
        cure = "keep runs on a local disk with tracking.folder=FOLDER"
        return warning("disk speed", f"{found}: comparisons will wait for it", cure)
    return ok("disk speed", found)


def _kind(folder: Path) -> str:
    """Return the kind of file system a folder is on, as the kernel calls it."""
    import psutil

    mounts = psutil.disk_partitions(all=True)
    inside = [part for part in mounts if folder.is_relative_to(part.mountpoint)]
    return max(inside, key=lambda part: len(part.mountpoint)).fstype if inside else ""


CHECK = Check(Section.MACHINE, look)
