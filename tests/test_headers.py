"""Headers: which tensors have all their bytes in a file, and what is said of the others."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from layerparity.checkpoint.headers import intact, read_shard_header

# Two tensors of 12 and 8 bytes.
ENTRIES = {
    "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [12, 20]},
}


def shard(folder: Path, size: int = 20, **changes: list[int]) -> Path:
    """Write a file of ``size`` bytes behind its header; ``changes`` are offsets by tensor."""
    entries = {
        name: {**each, "data_offsets": changes.get(name, each["data_offsets"])}
        for name, each in ENTRIES.items()
    }
    header = json.dumps(entries).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    return file


def test_a_pointer_of_git_lfs_is_no_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n")
    assert [each.what for each in read_shard_header(file).findings] == ["not_fetched"]


@pytest.mark.parametrize(
    ("size", "whole", "said"),
    [
        (20, "ab", []),
        (19, "a", ["shard_truncated"]),
        (12, "a", ["shard_truncated"]),
        (11, "", ["shard_truncated"]),
        (21, "ab", ["bytes_left_over"]),
    ],
)
def test_a_tensor_is_whole_up_to_the_last_byte_of_its_file(
    tmp_path: Path, size: int, whole: str, said: list[str]
) -> None:
    read = read_shard_header(shard(tmp_path, size))
    assert "".join(each.name for each in read.tensors if intact(each, read.size)) == whole
    assert [each.what for each in read.findings] == said


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([11, 19], ["offsets_overlap", "bytes_left_over"]),
        ([13, 21], ["offsets_gap", "offsets_beyond_end"]),
        ([12, 19], ["size_wrong", "bytes_left_over"]),
    ],
)
def test_tensors_that_do_not_tile_the_file_are_named(
    tmp_path: Path, offsets: list[int], said: list[str]
) -> None:
    read = read_shard_header(shard(tmp_path, b=offsets))
    assert [each.what for each in read.findings] == said
