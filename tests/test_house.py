"""The house is measured: each fault of a plan is seen once, and a clean plan has none."""

from __future__ import annotations

from pathlib import Path

import house
import pytest
from house import Figure, broken, measure
from source import read

CLEAN = {
    "__init__": '"""Planted."""',
    "__main__": "from planted.door import main",
    "door": "from planted.hall import rooms, shared\n\n"
    "def main():\n    rooms.walk()\n    shared.walk()",
    "hall/__init__": "from .shared import walk",
    "hall/rooms": "from . import shared\n\nclass Settings: ...\n\ndef walk(): _step(); _step()\n\n"
    "def _step(): shared.walk()",
    "hall/shared": "class Settings: ...\n\nclass Walk: ...\n\ndef walk(): return Walk()",
}
ZERO = ("once", "circles", "knots", "private", "twins", "long", "suppressed")


def figures(folder: Path, **files: str) -> dict[str, Figure]:
    """Measure the clean package with these files added, or put in place of its own."""
    for name, text in (CLEAN | {k.replace("__in__", "/"): v for k, v in files.items()}).items():
        path = folder / "planted" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {figure.name: figure for figure in measure(read(folder / "planted"))}


def test_a_clean_plan_has_no_fault(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert {name: found[name].value for name in ZERO} == dict.fromkeys(ZERO, 0)
    assert (found["files"].value, found["rooms"].value, found["arrows"].value) == (6, 2, 0.5)
    assert found["arrows"].places == ["    2 door -> hall"]
    assert found["lines"].shown == "3 7 7"
    assert found["functions"].shown == "1 3 3"
    links = read(tmp_path / "planted").links
    assert links["planted.hall"] == links["planted.hall.rooms"] == {"planted.hall.shared"}
    assert found["largest"].shown == "65.0 % (hall)"
    # Files are short here, and two rooms cannot both be small.
    assert broken(found.values()) == ["lines", "largest"]


def test_a_circle_through_a_lazy_import_is_seen(tmp_path: Path) -> None:
    lazy = "def rooms():\n    from planted.hall import rooms\n    return rooms"
    found = figures(tmp_path, hall__in__shared=lazy)
    assert found["circles"].value == 1
    assert found["circles"].places == [
        "2 files: planted.hall.rooms, planted.hall.shared",
        "    planted/hall/rooms.py:1 imports planted.hall.shared",
        "    planted/hall/shared.py:2 imports planted.hall.rooms lazy",
    ]
    assert found["knots"].value == 0
    assert "circles" in broken(found.values())


def test_a_circle_for_types_only_is_seen(tmp_path: Path) -> None:
    typing = (
        "import typing\nif typing.TYPE_CHECKING:\n    import planted.attic\n    import planted.door"
    )
    found = figures(tmp_path, attic="import planted.cellar", cellar=typing)
    assert found["circles"].value == 1
    assert "    planted/cellar.py:3 imports planted.attic typing" in found["circles"].places
    assert found["knots"].places[0] == "2 rooms: attic, cellar"
    assert found["arrows"].shown == "1.00 (4)"


@pytest.mark.parametrize("says", ["planted.door", "planted.door.main"])
def test_a_circle_through_a_text_is_seen(tmp_path: Path, says: str) -> None:
    found = figures(tmp_path, hall__in__shared=f"DOOR = {says!r}")
    assert found["circles"].value == 0
    assert "2 rooms: door, hall" in found["knots"].places
    assert "knots" in broken(found.values())


def test_a_circle_within_a_room_is_seen(tmp_path: Path) -> None:
    """Files of a room and of a room in it may not import each other, though no two files do."""
    inner = {
        "hall__in__nook__in____init__": "",
        "hall__in__nook__in__door": "import planted.hall.shared",
    }
    found = figures(
        tmp_path,
        hall__in__rooms="import planted.hall.nook.shelf",
        hall__in__nook__in__shelf="",
        **inner,
    )
    assert found["circles"].value == 0
    assert found["knots"].places == ["2 rooms in rooms: hall, hall/nook"]


def test_what_is_suppressed_is_counted(tmp_path: Path) -> None:
    lines = ("from typing import Any", "x: Any = 1  # type: ignore", "y = Anything.Any  # noqa")
    found = figures(tmp_path, attic="\n".join(lines))
    assert found["suppressed"].value == 3


def test_a_twin_class_is_seen_nested_or_not(tmp_path: Path) -> None:
    found = figures(tmp_path, attic="class Attic:\n    class Walk: ...")
    assert found["twins"].places == ["Walk: planted.attic, planted.hall.shared"]
    assert "twins" in broken(found.values())


def test_a_private_function_used_once_is_seen(tmp_path: Path) -> None:
    once = "def walk(): _step()\n\ndef _step(): _step()\n\ndef _never(): ...\n\ndef _twice(): ..."
    users = "from planted.attic import _twice as t\nfrom planted import attic\n\nattic._twice()"
    # This one's own function of that name is no use of the attic's.
    own = "from planted import attic\n\ndef _twice(): attic.walk()\n\n_twice()\n_twice()"
    found = figures(tmp_path, attic=once, cellar=f"{users}\nattic._twice()", garden=own)
    assert found["once"].places == ["planted/attic.py:3 _step"]
    # Of nine functions; the hall's `_step` is used twice.
    assert found["once"].value == pytest.approx(100 / 9)
    once_elsewhere = figures(tmp_path, attic=once, cellar=users)["once"]
    assert once_elsewhere.places[1:] == ["planted/attic.py:7 _twice"]
    assert once_elsewhere.shown == "22 % (2, of 5 private)"


def test_a_private_import_across_rooms_is_seen(tmp_path: Path) -> None:
    attic = (
        "from planted.hall import __doc__\n"
        "def f():\n    from planted.hall.rooms import walk, _step\n    import planted.hall._nook"
    )
    inside = "from planted.hall import _nook\nfrom planted.hall.shared import __doc__"
    nook = {"hall__in___nook": "", "hall__in__rooms": inside}
    found = figures(tmp_path, attic=attic, **nook)
    assert found["private"].places == [
        "planted/attic.py:3 imports planted.hall.rooms: walk, _step",
        "planted/attic.py:4 imports planted.hall._nook",
    ]
    assert "private" in broken(found.values())


def test_short_files_with_one_user_and_long_ones_are_seen(tmp_path: Path) -> None:
    found = figures(tmp_path, attic="x = 1\n" * 401, cellar="from planted import attic, hall")
    assert found["long"].places == ["planted/attic.py"]
    assert found["confetti"].places == [
        "    5 planted/door.py, used by planted.__main__",
        "    7 planted/hall/rooms.py, used by planted.door",
    ]


def test_the_command_says_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures(tmp_path, attic="class Walk: ...")
    monkeypatch.setattr(house, "ROOT", tmp_path / "planted")
    assert (house.main([]), house.main(["--check"])) == (0, 1)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "twins class names in several modules 1 <= 0 BROKEN" in rows
    assert "circles circles between files 0 <= 0 kept" in rows
    assert house.main(["--why", "twins"]) == 0
    assert capsys.readouterr().out == "Walk: planted.attic, planted.hall.shared\n"
    monkeypatch.setattr(house, "LIMITS", {"circles": ("<=", 0)})
    assert house.main(["--check"]) == 0
