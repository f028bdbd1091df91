"""Each planted fault fits the source as it is; the tool that plants them tells what notices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutants import ROOT, Ended, Mutant, copied, planted

MUTANTS = mutants.mutants()
ROOMS = sorted(path.name for path in (ROOT / "src" / "layerparity").iterdir() if path.is_dir())

PASSES = "def test_one(): assert __import__('planted').ONE == 1\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("tree"))


def test_each_room_has_two() -> None:
    count = Counter(each.room for each in MUTANTS)
    rooms = [room for room in ROOMS if room != "__pycache__"]
    assert {room: count[room] for room in rooms if count[room] < 2} == {}
    assert set(count) <= set(rooms) and len(MUTANTS) >= 40


@pytest.fixture(scope="module")
def texts(tree: Path) -> dict[Path, str]:
    """The copy's source as it is without a fault."""
    return {path: path.read_text() for path in (tree / "src").rglob("*.py")}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.name for each in MUTANTS])
def test_it_fits_the_source_and_names_its_tests(
    mutant: Mutant, tree: Path, texts: dict[Path, str]
) -> None:
    assert (ROOT / mutant.tests).is_file()
    before = written(texts)
    with planted(mutant, tree):
        since = [path for path, at in written(texts).items() if at != before[path]]
        changed = [path for path in since if path.read_text() != texts[path]]
        assert [path.relative_to(tree / "src" / "layerparity").parts[0] for path in changed] == [
            mutant.room
        ]
    since = [path for path, at in written(texts).items() if at != before[path]]
    assert since and {path: path.read_text() for path in since} == {p: texts[p] for p in since}


def written(texts: dict[Path, str]) -> dict[Path, tuple[int, int, int]]:
    """Return what changes of each file when it is written: to read them all takes longer."""
    stats = {path: path.stat() for path in texts}
    return {path: (at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for path, at in stats.items()}


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (PASSES, "caught"),
        ("def test_nothing(): pass\n", "NOT CAUGHT"),
        ("import time, planted\ndef test(): time.sleep(600 * (planted.ONE - 1))\n", "too late"),
        ("import planted\nassert planted.ONE == 1\ndef test(): pass\n", "pytest ended with 2"),
    ],
)
def test_what_notices_is_told_from_what_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    test: str,
    said: str,
) -> None:
    (tmp_path / "tree" / "src").mkdir(parents=True)
    (tmp_path / "tree" / "src" / "planted.py").write_text("ONE = 1\n")
    (tmp_path / "tree" / "test_one.py").write_text(test)
    patch = tmp_path / "one.patch"
    diff = "--- a/src/planted.py\n+++ b/src/planted.py\n@@ -1 +1 @@\n-ONE = 1\n+ONE = 2\n"
    patch.write_text(diff)
    mutant = Mutant("room/one", patch, "test_one.py")
    monkeypatch.setattr(mutants, "mutants", lambda: [mutant])
    monkeypatch.setattr(mutants, "copied", (tmp_path / "tree").rename)
    if said == "too late":
        monkeypatch.setattr(mutants, "NOTICE", 4)
    assert mutants.main(["room", "--workers", "1"]) == (0 if said == "caught" else 1)
    assert said in capsys.readouterr().out


def test_tests_that_fail_without_a_fault_notice_nothing() -> None:
    mutant = Mutant("room/one", Path("one.patch"), "test_one.py")
    failing = {"test_one.py": Ended(1, 0.1, "")}
    assert mutants._outcome(mutant, Ended(1, 0.1, ""), failing) == "not known"
