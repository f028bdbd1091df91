"""An export's archive: nothing in it is compressed, encrypted, or other than what it lists."""

from __future__ import annotations

import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from layerparity.ground.errors import UserError
from layerparity.record.exported import FILE, opened, unpack, write_export
from layerparity.record.folder import MANIFEST
from layerparity.record.stored_run import FINISHED, StoredRun

RUN = "a" * 32
# Where an entry says that it is encrypted: in its own header, and in the archive's list.
_HEADERS = ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An export of one run of two files."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    (folder / "config.yaml").write_text("a: 1")
    run = StoredRun(RUN, "r", FINISHED, {"kind": "golden"}, datetime.now(tz=UTC))
    run = StoredRun(**{**vars(run), "locate": folder.joinpath})
    write_export([run], tmp_path / "r.zip", lambda name: None)
    return tmp_path / "r.zip"


def test_what_is_exported_is_unpacked(archive: Path, tmp_path: Path) -> None:
    told: list[str] = []
    listing = unpack(archive, tmp_path / "out", told.append)
    assert told == ["config.yaml", MANIFEST], "a folder with a manifest is a whole run"
    assert (tmp_path / "out" / listing.runs[0].folder / "config.yaml").read_text() == "a: 1"


@pytest.mark.parametrize("name", ["config.yaml", FILE])
def test_an_encrypted_member_is_refused_before_anything_is_read(archive: Path, name: str) -> None:
    data = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as whole:
        entry = next(each for each in whole.infolist() if each.filename.endswith(name))
    marks = []
    for mark, flags in _HEADERS:
        at = data.find(mark)
        while at >= 0:
            if entry.filename.encode() in data[at : at + 46 + len(entry.filename)]:
                data[at + flags] |= 1
                marks.append(at)
            at = data.find(mark, at + 4)
    assert len(marks) == 2
    archive.write_bytes(data)
    said = f"{entry.filename} is compressed or encrypted, and in an export nothing is"
    with pytest.raises(UserError, match=said), opened(archive):
        pass


def test_a_list_of_another_size_is_refused(archive: Path) -> None:
    with zipfile.ZipFile(archive) as whole:
        files = {name: whole.read(name) for name in whole.namelist()}
    listing = json.loads(files[FILE])
    listing["runs"][0]["files"]["config.yaml"]["bytes"] += 1
    files[FILE] = json.dumps(listing).encode()
    with zipfile.ZipFile(archive, "w") as whole:
        for name, data in files.items():
            whole.writestr(zipfile.ZipInfo(name), data)
    with pytest.raises(UserError, match=r"config\.yaml is not as large as listed"), opened(archive):
        pass
