"""job=gc: what goes by its age, what stays and why, and that half a removal never looks whole."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Ended
from runs import make_run, sites
from stores import fresh_store

from layerparity.ground.errors import UserError
from layerparity.record.stored_run import StoredRun
from layerparity.tracking import in_use, removal
from layerparity.tracking.store import Store

Cli = Callable[..., Ended]


def kept(store: Store, kind: str, name: str, parent: str | None = None, **tags: Any) -> StoredRun:
    """Keep a run of two blocks in a store; return it."""
    with store.start(name, kind, {"model": "tiny", **tags}, {}, parent=parent) as active:
        make_run(active.folder, sites(), kind=kind)
    found = store.get(active.id)
    assert found is not None
    return found


def aged(folder: Path) -> None:
    """Have all runs of a store but the comparison begin two hours earlier."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute(
            "UPDATE runs SET start_time = start_time - 7200000 WHERE name != 'compared'"
        )


class Home:
    """A store with a golden that fed a candidate, one that a comparison names, and a lone one.

    All but the comparison are two hours old.
    """

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = fresh_store(folder), folder
        self.lone = kept(self.store, "golden", "lone")
        self.fed = kept(self.store, "golden", "fed")
        self.judged = kept(self.store, "candidate", "judged", inputs_from=self.fed.id)
        sides = {"golden": self.fed.id, "candidate": self.judged.id, "verdict": "pass"}
        self.comparison = kept(self.store, "comparison", "compared", **sides)
        self.latest = kept(self.store, "golden", "newest")
        kept(self.store, "candidate", "newest-candidate", inputs_from=self.latest.id)
        with pytest.raises(UserError), self.store.start("broken", "golden", {}, {}):
            raise UserError("no")
        aged(folder)

    @property
    def words(self) -> tuple[str, str]:
        return "job=gc", f"tracking.folder={self.folder}"

    @property
    def names(self) -> set[str]:
        return {run.name for run in self.store.runs()}

    @property
    def files(self) -> set[str]:
        return {path.name for path in (self.folder / "artifacts").iterdir()}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_nothing_is_removed_before_it_was_shown(cli: Cli, home: Home) -> None:
    before = home.files
    shown = cli(*home.words, "job.older_than=1h")
    assert shown.exit == 0, shown.err
    rows = {run.name: line for run in home.store.runs() for line in shown.out.splitlines()
            if run.id[:8] in line.split()}  # fmt: skip
    assert " goes" in rows["lone"] and re.search(r"\d+(\.\d+)? k?B ", rows["lone"])
    assert " goes" in rows["broken"]
    assert "stays: golden=latest means it" in rows["newest"]
    assert f"comparison compared ({home.comparison.id[:8]}) judges by it" in rows["fed"]
    assert "compared" not in rows
    assert re.search(r"^2 go, .*; 4 stay although asked for; 1 not asked for$", shown.out, re.M)
    assert home.files == before and "lone" in home.names
    (command,) = re.findall(r"^Nothing was removed yet\. .*: python run\.py (.*)$", shown.out, re.M)
    removed = cli(*command.split())
    assert removed.exit == 0, removed.err
    assert "Removed: 2 of 2 runs, 0 leftovers." in removed.out
    assert home.names == {"fed", "judged", "compared", "newest", "newest-candidate"}
    assert home.files == {run.id for run in home.store.runs()}
    again = cli(*home.words, "job.older_than=1h")
    assert again.exit == 0 and "Nothing goes." in again.out


def test_the_parts_of_a_sweep_stand_in_its_row(cli: Cli, home: Home) -> None:
    sweep = kept(home.store, "sweep", "swept")
    parts = [kept(home.store, "candidate", f"part-{n}", sweep.id) for n in range(3)]
    again = [kept(home.store, "candidate", f"again-{n}", parts[0].id) for n in range(2)]
    kept(home.store, "candidate", "later")
    aged(home.folder)
    shown = cli(*home.words, "job.older_than=1h")
    (row,) = (line for line in shown.out.splitlines() if sweep.id[:8] in line.split())
    assert "swept and its 5 parts" in row and " goes" in row
    assert not [each.id for each in (*parts, *again) if each.id[:8] in shown.out]
    assert re.search(r"^9 go, ", shown.out, re.M), "with lone, broken, newest-candidate"


def test_a_named_run_goes_unless_something_refers_to_it(cli: Cli, home: Home) -> None:
    refused = cli(*home.words, "run=judged", "job.apply=true")
    assert refused.exit == 2 and len(refused.err.splitlines()) == 1
    assert f"comparison compared ({home.comparison.id[:8]}) judges it" in refused.err
    assert f"job=gc run={home.comparison.id[:8]} " in refused.err
    for name in ("compared", "judged", "fed"):
        ended = cli(*home.words, f"run={name}", "job.apply=true")
        assert ended.exit == 0, ended.err
        assert name not in home.names
    assert {"lone", "newest"} < home.names


def test_mistakes_are_told_in_one_line(cli: Cli, home: Home) -> None:
    with home.store.start("at-work", "golden", {}, {}) as active:
        for words, said in (
            ((), "job=gc wants to know what may go: add job.older_than=14d"),
            (("job.apply=true",), "add job.older_than=14d"),
            (("job.older_than=2 weeks",), "write it as 12h, 14d or 8w"),
            (("run=absent",), "There is no run 'absent'"),
            (("run=lone", "job.older_than=1d"), "run= names what goes"),
            (("run=at-work",), "stays: it is running: wait until it has ended, or end it."),
        ):
            ended = cli(*home.words, *words)
            assert ended.exit == 2 and said in ended.err, (words, ended.err)
            assert len(ended.err.splitlines()) == 1
        make_run(active.folder, sites())
    served = cli(
        "job=gc", "tracking=server", "tracking.uri=http://127.0.0.1:1", "job.older_than=1d"
    )
    assert served.exit == 2 and "cannot see who uses a server's" in served.err
    empty = cli("job=gc", "tracking.folder=none", "job.older_than=1d")
    assert empty.exit == 0 and not Path("none").exists()


def test_what_an_experiment_names_stays(cli: Cli, home: Home, tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text("inputs: {run: lone}\nlist: [{x: 1}]\n")
    shown = cli(*home.words, "job.older_than=1h")
    assert "experiments/mine.yaml names it" in shown.out


HOLDER = """
    import sys
    from pathlib import Path
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store
    store = open_store(TrackingConfig(folder=sys.argv[1]))
    store.find(sys.argv[2])[0].read_manifest()
    print("reads", flush=True)
    sys.stdin.readline()
"""


def started(code: str, *words: str) -> subprocess.Popen[str]:
    """Start Python in a process of its own, which can be spoken to."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def test_what_another_process_reads_stays_until_that_ends(cli: Cli, home: Home) -> None:
    reader = started(HOLDER, str(home.folder), "lone")
    assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
    ruled = cli(*home.words, "job.older_than=1h", "job.apply=true")
    assert ruled.exit == 0 and "lone" in home.names and "broken" not in home.names
    assert f"note: lone ({home.lone.id[:8]}) stays: another command uses it" in ruled.out
    named = cli(*home.words, "run=lone", "job.apply=true")
    assert named.exit == 2 and "stays: another command uses it: wait" in named.err
    reader.communicate("\n")
    assert cli(*home.words, "run=lone", "job.apply=true").exit == 0
    assert "lone" not in home.names and home.lone.id not in home.files


def test_a_run_that_is_being_removed_cannot_be_read(home: Home) -> None:
    reader = """
        from layerparity.ground.errors import UserError
        import sys
        from layerparity.settings.tracking import TrackingConfig
        from layerparity.tracking.opening import open_store
        try:
            open_store(TrackingConfig(folder=sys.argv[1])).find("lone")[0].read_manifest()
        except UserError as error:
            print(error)
    """
    with removal.taken(home.store, [home.lone]) as refused:
        assert refused == {}
        said, _ = started(reader, str(home.folder)).communicate()
        assert "is being removed by job=gc" in said
    assert started(reader, str(home.folder)).communicate()[0] == ""


def test_two_at_once_remove_each_run_once(home: Home) -> None:
    code = """
        import sys
        from layerparity.cli.door import main
        sys.argv = ["run.py", *sys.argv[1:]]
        sys.exit(main())
    """
    for count in range(6):
        kept(home.store, "golden", f"many-{count}")
    kept(home.store, "golden", "last")
    aged(home.folder)
    words = (*home.words, "job.older_than=1h", "job.apply=true")
    both = [started(code, *words) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert home.names == {"fed", "judged", "compared", "newest", "newest-candidate", "last"}
    assert home.files == {run.id for run in home.store.runs()}


@pytest.mark.parametrize("step", ["delete", "rename", "rmtree"])
def test_what_a_killed_removal_left_the_next_one_finds(
    cli: Cli, home: Home, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner = {"delete": Store, "rename": Path, "rmtree": removal.shutil}[step]
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, die)
        with pytest.raises(KeyboardInterrupt), removal.taken(home.store, [home.lone]):
            removal.remove(home.store, [home.lone], lambda run: None)
    whole = step == "delete"
    assert ("lone" in home.names) == whole
    assert (home.store.get(home.lone.id) is not None) == whole
    assert (home.lone.id in home.files) == (step != "rmtree")
    shown = cli(*home.words, "job.older_than=100w")
    assert shown.exit == 0 and ("1 go, " in shown.out) == (step == "rename")
    assert ("leftover: " in shown.out) == (step == "rmtree")
    ended = cli(*home.words, "job.older_than=100w", "job.apply=true")
    assert ended.exit == 0, ended.err
    assert home.files == {run.id for run in home.store.runs()}


def test_leftovers_of_killed_exports_are_found(cli: Cli, home: Home, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours = {f".a.zip.{ended.pid}.part": "PK", f".b.{ended.pid}.part/runs/id/x": "x"}
    others = {
        f".young.zip.{ended.pid}.part": "PK",
        f".live.zip.{os.getpid()}.part": "PK",
        f".text.zip.{ended.pid}.part": "mine",
        f".a.txt.{ended.pid}.part": "PK",
        f".c.{ended.pid}.part/mine": "x",
        ".notes.part": "x",
    }
    for name, text in {**ours, **others}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        old = time.time() - (0 if "young" in name else 3600)
        for each in (path, *path.parents):
            if each == tmp_path:
                break
            os.utime(each, (old, old))
    found = {path.name for path in removal.leftovers(home.store, tmp_path)}
    assert found == {name.partition("/")[0] for name in ours}
    assert cli(*home.words, "job.older_than=100w", "job.apply=true").exit == 0
    left = {path.name for path in tmp_path.glob(".*.part")}
    assert left == {name.partition("/")[0] for name in others}


def test_a_hold_ends_with_its_process_only(home: Home) -> None:
    assert in_use.hold(home.folder, home.lone.id)
    # This process may remove what it read itself; a child of it may not.
    child = """
        import sys
        from pathlib import Path
        from layerparity.tracking import in_use
        print(in_use.take(Path(sys.argv[1]), sys.argv[2]))
    """
    assert started(child, str(home.folder), home.lone.id).communicate()[0] == "False\n"
    assert in_use.take(home.folder, home.lone.id)
    in_use.release(home.folder, home.lone.id)
    assert started(child, str(home.folder), home.lone.id).communicate()[0] == "True\n"
