"""Exports as files: what is written is read back, and what may hide something is not opened."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from runs import make_run, sites

from layerparity.ground.errors import UserError
from layerparity.record.exported import FILE, ExportList, opened, unpack, write_export
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest

# Of an entry in a zip's directory: how it begins, and where its flags and its name stand.
_ENTRY, _FLAGS, _NAME = b"PK\x01\x02", 8, 46
_ENCRYPTED = 1


def said(name: str) -> None:
    """Tell nobody which file was written."""


@pytest.fixture
def archive(tmp_path: Path) -> tuple[Path, ExportList, Manifest]:
    """A run of two blocks as one file, its list, and the manifest of the run."""
    run = make_run(tmp_path / "run", sites())
    path = tmp_path / "run.zip"
    return path, write_export([run], path, said), run.read_manifest()


def flagged(path: Path, name: str, flag: int) -> None:
    """Set a flag of a zip's member, as its directory has it."""
    data = bytearray(path.read_bytes())
    at = data.find(_ENTRY)
    while data[at + _NAME : at + _NAME + len(name)] != name.encode():
        at = data.index(_ENTRY, at + 1)
    data[at + _FLAGS] |= flag
    path.write_bytes(data)


def test_what_is_exported_is_unpacked(
    archive: tuple[Path, ExportList, Manifest], tmp_path: Path
) -> None:
    path, listing, manifest = archive
    assert unpack(path, tmp_path / "there", said) == listing
    again = RunFolder(tmp_path / "there" / listing.runs[0].folder)
    assert again.read_manifest() == manifest
    for record in manifest.records:
        assert again.read_tensor(record).shape == record.shape


@pytest.mark.parametrize("member", [FILE, "manifest.json", "inputs.safetensors"])
def test_an_encrypted_member_is_refused_before_any_is_read(
    archive: tuple[Path, ExportList, Manifest], tmp_path: Path, member: str
) -> None:
    path, listing, _ = archive
    name = FILE if member == FILE else f"{listing.runs[0].folder}/{member}"
    flagged(path, name, _ENCRYPTED)
    with zipfile.ZipFile(path) as held:
        assert held.getinfo(name).flag_bits & _ENCRYPTED
    refused = rf"{re.escape(name)} is compressed or encrypted, and in an export nothing is"
    with pytest.raises(UserError, match=refused), opened(path):
        pass
    with pytest.raises(UserError, match=refused):
        unpack(path, tmp_path / "there", said)
    assert not (tmp_path / "there").exists()
