"""Trials of `tools/faults.py` on what a store stands on: disk, server, database and clock."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from faults_child import Child
from faults_held import LEFT, LOST, WHOLE, Finding, changes, numbers_of
from faults_scene import COMMANDS, GOLDEN, Scene, of_command

_YEARS = 10 * 365 * 86400.0


def fill_disk(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Run on a disk with little room, a fresh store or a used one; make room; yield what is wrong.

    Of five, one is the disk of temporary files, and in one no file may grow beyond a size; so it is
    in all without the right to mount a disk.
    """
    place, right, way = scene.fresh(), scene.course("golden").right, number % 5
    used = scene.base_bytes if number % 2 else 0
    # A store with its first run needs about as much again as the one with two has.
    room = used + int(maker.random() * 1.2 * scene.base_bytes)
    size = maker.choice((4096, 8192, 65536)) if way == 3 else 1 << 30 if way == 4 else room
    with _disk(place.folder / "tmp" if way == 3 else place.store, size) as enlarge:
        if used:
            shutil.copytree(scene.base.store, place.store, dirs_exist_ok=True)
        largest = None if enlarge and way < 4 else int(10 ** maker.uniform(3, 6))
        ended = place.run(COMMANDS["golden"], largest=largest)
        found = [*of_command(ended, "on a full disk", (0, 2))]
        if ended.status == 2 and ended.err.count("\n") != 1:
            found.append((LEFT, f"more than a line: {ended.err[:300]}"))
        if enlarge:
            enlarge()
        found += of_command(place.run(COMMANDS["golden"]), "with room again", (0,), LOST)
        found += [*changes(scene.held if used else [], place.held(), right), *place.leftovers()]
    what = ("disk of", "disk of", "disk of", "temporary files of", "largest file")[way]
    yield from place.told(found, f"{what} {largest or size} bytes")


@contextmanager
def _disk(folder: Path, size: int) -> Iterator[Callable[[], object] | None]:
    """Mount a small disk at a folder; yield what makes it large, or None where one may not."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o"]
    mounted = subprocess.run(
        [*mount, f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        yield None
        return
    try:
        yield lambda: subprocess.run([*mount, "remount,size=1g", "tmpfs", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def damage_database(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Damage the database, compare two of its runs; yield a traceback, or a verdict unlike before.

    Then do what the message says, and compare the runs' folders, which nothing happened to.
    """
    place, course = scene.place(), scene.course("compare")
    path = place.store / "mlflow.db"
    ways = sorted(DAMAGE)
    way = ways[number % len(ways)]
    DAMAGE[way](path, maker)
    folders = {each.kind: place.store / each.folder for each in scene.held}
    ended = place.run(COMMANDS["compare"])
    found = [*of_command(ended, "compare", (course.ended.status, 2))]
    if ended.status == 2 and ended.err.count("\n") != 1:
        found.append((LEFT, f"more than a line: {ended.err[:300]}"))
    if ended.status == course.ended.status and numbers_of(place.store) != course.numbers:
        found.append((WHOLE, "the verdict is another"))
    for end in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(place.folder / f"damaged{end}")
    sides = [f"{kind}={folder}" for kind, folder in folders.items()]
    again = place.run(("job=compare", *sides, "name=mine"))
    found += of_command(again, "in a new database", (course.ended.status,), LOST)
    yield from place.told([*found, *place.leftovers()], way)


def _bytes(change: Callable[[bytearray, random.Random], object]) -> Callable[..., None]:
    """Return what changes the content of a database's file."""

    def damage(path: Path, maker: random.Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, maker)
        path.write_bytes(content)

    return damage


def _page(content: bytearray, maker: random.Random, new: bytes | None = None) -> None:
    at = 4096 * maker.randrange(len(content) // 4096)
    content[at : at + 4096] = maker.randbytes(4096) if new is None else new


def _bit(content: bytearray, maker: random.Random, below: int | None = None) -> None:
    content[maker.randrange(below or len(content))] ^= 1 << maker.randrange(8)


def _cut(content: bytearray, maker: random.Random) -> None:
    del content[maker.randrange(len(content)) :]


def _swap(content: bytearray, maker: random.Random) -> None:
    one, two = (4096 * each for each in maker.sample(range(1, len(content) // 4096), 2))
    content[one : one + 4096], content[two : two + 4096] = (
        content[two : two + 4096],
        content[one : one + 4096],
    )


def _beside(end: str) -> Callable[[Path, random.Random], None]:
    """Return what puts a log of something else beside a database."""

    def damage(path: Path, maker: random.Random) -> None:
        path.with_name(path.name + end).write_bytes(maker.randbytes(8192))

    return damage


def _by_words(*words: str) -> Callable[[Path, random.Random], None]:
    """Return what changes a database as sqlite would."""

    def damage(path: Path, maker: random.Random) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as opened:
            opened.execute(maker.choice(words))

    return damage


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "a page of chance": _bytes(_page),
    "a page of zeros": _bytes(lambda content, maker: _page(content, maker, bytes(4096))),
    "a bit of the header": _bytes(lambda content, maker: _bit(content, maker, 100)),
    "a bit": _bytes(_bit),
    "cut off": _bytes(_cut),
    "bytes behind its end": _bytes(lambda content, maker: content.extend(maker.randbytes(5000))),
    "text": _bytes(lambda content, maker: content.__setitem__(slice(None), b"not a database\n")),
    "empty": _bytes(lambda content, maker: content.clear()),
    "two pages exchanged": _bytes(_swap),
    "a foreign write-ahead log": _beside("-wal"),
    "a foreign journal": _beside("-journal"),
    "a table gone": _by_words(
        "DROP TABLE runs", "DROP TABLE tags", "DROP TABLE experiments", "DROP TABLE alembic_version"
    ),
    "another schema": _by_words("UPDATE alembic_version SET version_num = '0123456789ab'"),
}


def set_clock(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Set the clock wrong for a run that ends and one that is killed; then run with the right one.

    What was made last is the latest, whatever the clock said before.
    """
    course, place = scene.course("golden"), scene.place()
    off = (_YEARS, -_YEARS, 3600.0, -3600.0, 960.0, -960.0)[number % 6]
    # From the beginning, or somewhere on the way; there and back.
    clock = maker.choice(((off, 1 << 30, 0.0), (0.0, maker.randrange(200), off), (off, 100, -off)))
    ended = place.run((*GOLDEN, "name=by-a-wrong-clock"), clock=clock)
    found = [*of_command(ended, "by a wrong clock", (0,))]
    child = Child(place.task((*GOLDEN, "name=killed"), clock=clock))
    time.sleep(maker.random() * course.ended.seconds)
    child.send()
    child.wait()
    found += of_command(place.run((*GOLDEN, "name=the-last")), "by the right one", (0,), LOST)
    compared = place.run(("job=compare", "golden=latest", "candidate=the-candidate"))
    found += of_command(compared, "compare", (scene.course("compare").ended.status,))
    if "golden:    the-last " not in compared.out:
        found.append((LOST, "the run that was made last is not the latest"))
    found += [*changes(scene.held, place.held(), course.right), *place.leftovers()]
    yield from place.told(found, f"{clock[0]:+.0f} s, then {clock[2]:+.0f} s")
