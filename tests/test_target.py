"""Target folders: what an earlier call left there is taken over only where it is still the same."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerparity.checkpoint.shard_writer import FinishedShard
from layerparity.checkpoint.shards import Shard
from layerparity.checkpoint.target import ConversionState
from layerparity.ground.errors import UserError

STATE = ConversionState({"a.safetensors": [8, 1]}, "config", "bfloat16", "layout")
# A shard without tensors is its header.
SHARD = Shard("a.safetensors", ())


def finished(folder: Path) -> FinishedShard:
    """Write the shard, and return what is noted of it."""
    file = folder / SHARD.name
    file.write_bytes(SHARD.header)
    written = hashlib.sha256(SHARD.header).hexdigest()
    return FinishedShard(SHARD.bytes, file.stat().st_mtime_ns, written)


def kept(folder: Path, noted: FinishedShard) -> list[str]:
    state = replace(STATE, done={})
    state.keep_sound(folder, {SHARD.name: noted}, [SHARD])
    return list(state.done)


def test_a_shard_that_nobody_touched_is_kept_and_one_that_was_copied_is_read(
    tmp_path: Path,
) -> None:
    noted = finished(tmp_path)
    assert kept(tmp_path, noted) == [SHARD.name]
    for second in (1, 2**32):
        os.utime(tmp_path / SHARD.name, (second, second))
        assert kept(tmp_path, noted) == [SHARD.name]


@pytest.mark.parametrize("later", [-1, 1])
def test_a_shard_of_other_bytes_is_written_again(tmp_path: Path, later: int) -> None:
    """Of the same size, as a disk that failed leaves it or a program that wrote into it."""
    noted = finished(tmp_path)
    file = tmp_path / SHARD.name
    file.write_bytes(bytes(SHARD.bytes))
    os.utime(file, ns=(noted.mtime_ns, noted.mtime_ns + later * 10**9))
    assert kept(tmp_path, noted) == []


def test_a_shard_of_another_size_or_none_is_written_again(tmp_path: Path) -> None:
    noted = finished(tmp_path)
    assert kept(tmp_path, replace(noted, size=noted.size + 1)) == []
    (tmp_path / SHARD.name).unlink()
    assert kept(tmp_path, noted) == []


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"dtype": "float16"}, "with dtype=float16, not bfloat16"),
        ({"source": {"a.safetensors": [9, 1]}}, "or a.safetensors has changed since"),
        ({"source": {**STATE.source, "b": [1, 1]}}, "or b has changed since"),
        ({"config": "another"}, "with another config.json"),
        ({"layout": "another"}, "by another version of layerparity"),
    ],
)
def test_what_another_conversion_began_is_refused(other: dict[str, Any], why: str) -> None:
    STATE.refuse_other(replace(STATE), Path("to"))
    with pytest.raises(UserError, match=why):
        STATE.refuse_other(replace(STATE, **other), Path("to"))
