"""Reading: bytes of a checkpoint by position, and no others in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerparity.ground.errors import UserError
from layerparity.model.header import stamp
from layerparity.model.reading import Files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(100)))
    return path


def read(files: Files, file: Path, begin: int, size: int) -> bytes:
    into = bytearray(size)
    files.read(file, begin, memoryview(into))
    return bytes(into)


def test_bytes_are_read_where_they_stand(file: Path) -> None:
    files = Files({})
    assert read(files, file, 10, 5) == bytes(range(10, 15))
    assert read(files, file, 0, 100) == bytes(range(100))
    files.close()


def test_bytes_that_come_in_parts_are_joined(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network's file system gives them."""
    whole = os.preadv

    def part(handle: int, into: list[memoryview], begin: int) -> int:
        return whole(handle, [into[0][:7]], begin)

    monkeypatch.setattr(os, "preadv", part)
    assert read(Files({}), file, 3, 90) == bytes(range(3, 93))


@pytest.mark.parametrize(("begin", "size"), [(99, 2), (100, 1), (0, 101)])
def test_a_file_that_ends_early_is_refused(file: Path, begin: int, size: int) -> None:
    """What was in the memory before would be taken for a weight."""
    with pytest.raises(UserError, match=r"model\.safetensors is cut off: fetch it again"):
        read(Files({}), file, begin, size)


@pytest.mark.parametrize("other", range(3), ids=["size", "time", "change"])
def test_a_file_that_changed_since_its_header_was_read_is_refused(file: Path, other: int) -> None:
    """By any of its size and its times: a time that was set back is no proof."""
    known = list(stamp(file.stat()))
    Files({file: (known[0], known[1], known[2])}).check(file)
    known[other] -= 1
    files = Files({file: (known[0], known[1], known[2])})
    with pytest.raises(UserError, match="changed while it was being used"):
        files.check(file)
    with pytest.raises(UserError, match="changed while it was being used"):
        read(files, file, 0, 1)
