"""Files: whole or absent, and none outside the folder whose manifest names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerparity.ground.errors import UserError
from layerparity.ground.files import inside, whole_file, write_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, beside one whose name begins in the same way."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2" / "manifest.json").write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["a.safetensors", "deep/a.safetensors", "deep/../a", "."])
def test_a_file_of_the_folder_is_found(folder: Path, name: str) -> None:
    assert inside(folder, name) == folder / name


@pytest.mark.parametrize("name", ["../a", "../run-2/manifest.json", "deep/../../a", "/etc/passwd"])
def test_a_file_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="names a file outside its folder"):
        inside(folder, name)


def test_a_link_leads_outside_no_more_than_a_name(folder: Path) -> None:
    (folder / "linked").symlink_to(folder.parent / "run-2" / "manifest.json")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="names a file outside its folder"):
        inside(folder, "linked")


def test_half_a_file_is_never_there(folder: Path) -> None:
    path = folder / "manifest.json"
    write_text(path, "old")

    def fail() -> None:
        with whole_file(path) as part:
            part.write_text("ne")
            raise OSError

    with pytest.raises(OSError):
        fail()
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in folder.iterdir()] == ["manifest.json"]
