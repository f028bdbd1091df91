"""job=runs, job=export and job=import: what is listed, carried, taken, and refused."""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
from conftest import Ended
from runs import make_run, sites
from stores import fresh_store

from layerparity.ground.errors import UserError
from layerparity.making.reuse import reusable
from layerparity.record.exported import FILE, is_export, unpack, write_export
from layerparity.record.folder import MANIFEST, RunFolder
from layerparity.record.stored_run import MANIFEST_TAG
from layerparity.tracking import imports
from layerparity.tracking.imports import import_runs
from layerparity.tracking.store import Store

Cli = Callable[..., Ended]


def kept(store: Store, kind: str, name: str, **tags: Any) -> Any:
    """Keep a run of two blocks in a store, as a job does; return it."""
    made = {"model": "tiny", "scope": "full", "dtype": "float32", **tags}
    with store.start(name, kind, made, {}) as active:
        make_run(active.folder, sites(), kind=kind)
        text = (active.folder / MANIFEST).read_text()
        from layerparity.ground.files import text_digest

        active.set_tags({MANIFEST_TAG: text_digest(text)})
    return store.get(active.id)


@dataclass
class Home:
    """A store with a golden, a candidate that it fed, and a failed run; and both as one file."""

    folder: Path
    golden: Any
    candidate: Any

    @property
    def store(self) -> str:
        return f"tracking.folder={self.folder}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("exports") / "home"
    store = fresh_store(folder)
    golden = kept(store, "golden", "the-golden")
    candidate = kept(store, "candidate", "the-candidate", inputs_from=golden.id, verdict="pass")
    with pytest.raises(UserError), store.start("broken", "golden", {}, {}):
        raise UserError("no")
    return Home(folder, golden, candidate)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that refuses everything, and so stays empty."""
    return fresh_store(tmp_path_factory.mktemp("empty"))


@pytest.fixture
def archive(home: Home, tmp_path: Path) -> Path:
    path = tmp_path / "both.zip"
    write_export([home.golden, home.candidate], path, lambda name: None)
    return path


def test_runs_are_listed_by_what_they_are_and_how_they_ended(cli: Cli, home: Home) -> None:
    every = cli("job=runs", home.store)
    assert every.exit == 0 and "3 runs, " in every.out
    (row,) = [line for line in every.out.splitlines() if home.golden.id[:8] in line]
    assert all(word in row for word in ("golden", "tiny", "full", "float32", "finished", "kB"))
    assert all(len(line) <= 160 for line in every.out.splitlines())
    listed = json.loads(cli("job=runs", home.store, "--json").out)
    assert {each["id"] for each in listed} >= {home.golden.id, home.candidate.id}
    facts = {"kind": "golden", "model": "tiny", "scope": "full", "ended": "finished"}
    assert facts.items() <= next(r for r in listed if r["id"] == home.golden.id).items()
    assert "failed" in every.out and "pass" in every.out
    for words, names in (
        (("job.kind=golden",), {"the-golden", "broken"}),
        (("job.verdict=pass",), {"the-candidate"}),
        (("job.status=failed",), {"broken"}),
        (("job.kind=golden", "job.status=finished"), {"the-golden"}),
        (("""job.filter='attributes.run_name LIKE "the-%"'""",), {"the-golden", "the-candidate"}),
        (("job.model=another",), set()),
    ):
        shown = cli("job=runs", home.store, *words)
        assert shown.exit == 0, shown.err
        listed = {"the-golden", "the-candidate", "broken"}
        assert {name for name in listed if name in shown.out} == names, words
    one = cli("job=runs", home.store, "job.limit=1")
    assert re.search(r"1 run, [\d.]+ k?B; there are more: job.limit=2 lists them", one.out)
    wrong = cli("job=runs", home.store, "job.filter='kind ='")
    assert wrong.exit == 2 and "MLflow cannot search by job.filter=kind =" in wrong.err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("job.kind=goldn", "No run has job.kind=goldn. Did you mean 'golden'?"),
        ("job.model=tyny", "Did you mean 'tiny'?"),
        ("job.verdict=failed", "Did you mean 'fail'?"),
        ("job.kind=x", "No run has job.kind=x. There is: candidate, golden."),
    ],
)
def test_a_mistyped_rule_is_told_from_one_that_nothing_fits(
    cli: Cli, home: Home, word: str, says: str
) -> None:
    shown = cli("job=runs", home.store, word)
    assert shown.exit == 0 and says in shown.out, shown.out
    right = cli("job=runs", home.store, "job.kind=golden", "job.verdict=pass")
    assert "No run has" not in right.out


def test_a_status_that_no_run_has_is_refused(cli: Cli, home: Home) -> None:
    wrong = cli("job=runs", home.store, "job.status=done")
    assert (wrong.exit, len(wrong.err.splitlines())) == (2, 1)
    assert "give one of finished, failed, killed, running." in wrong.err


def test_listing_makes_no_store(cli: Cli, tmp_path: Path) -> None:
    shown = cli("job=runs", "tracking.folder=mistyped")
    assert shown.exit == 0 and f"There is no store of runs in {tmp_path / 'mistyped'}" in shown.out
    assert json.loads(cli("job=runs", "tracking.folder=mistyped", "--json").out) == []
    assert not (tmp_path / "mistyped").exists()


def test_a_candidate_is_exported_with_its_golden_and_imported_elsewhere(
    cli: Cli, home: Home, tmp_path: Path
) -> None:
    words = ("job=export", home.store, "run=the-candidate", "job.golden=true")
    exported = cli(*words, "to=carried.zip")
    assert exported.exit == 0, exported.err
    assert "job=import run=carried.zip" in exported.out
    again = cli(*words, "to=carried.zip")
    assert again.exit == 2 and "is there already" in again.err
    there = f"tracking.folder={tmp_path / 'there'}"
    taken = cli("job=import", there, "run=carried.zip")
    assert taken.exit == 0, taken.err
    assert "imported golden the-golden" in taken.out
    assert "imported candidate the-candidate" in taken.out
    golden, candidate = (fresh_store(tmp_path / "there").find(f"the-{k}")[0] for k in KINDS)
    assert candidate.tags["inputs_from"] == golden.id != home.golden.id
    assert "verdict" not in candidate.tags, "no comparison of this store says so"
    assert golden.read_manifest() == home.golden.read_manifest()
    for record in golden.read_manifest().records:
        assert golden.files.read_tensor(record).equal(home.golden.files.read_tensor(record))
    second = cli("job=import", there, "run=carried.zip")
    assert second.exit == 0 and f"is here already ({golden.id[:8]})" in second.out
    assert len(fresh_store(tmp_path / "there").runs()) == 2
    assert not list((tmp_path / "there" / "cache").iterdir())


def test_a_whole_store_is_merged_into_another(cli: Cli, tmp_path: Path) -> None:
    store = fresh_store(tmp_path / "home")
    golden = kept(store, "golden", "the-golden")
    kept(store, "candidate", "first", inputs_from=golden.id)
    kept(store, "golden", "newer")
    kept(store, "candidate", "last", inputs_from=golden.id)
    damaged = kept(store, "golden", "damaged")
    (damaged.folder / MANIFEST).write_text("{}")
    with store.start("told", "comparison", {}, {}):
        pass
    exported = cli("job=export", "run=all", f"tracking.folder={store.config.root}")
    assert exported.exit == 0, exported.err
    assert "damaged" in exported.out and "is left out: " in exported.out
    assert "not exported: 1 that are sweeps, comparisons (made again" in exported.out
    for _ in range(2):
        taken = cli("job=import", "run=all.zip", "tracking.folder=there")
        assert taken.exit == 0, taken.err
    there = fresh_store(tmp_path / "there")
    names = [run.name for run in there.runs()]
    assert sorted(names) == ["first", "last", "newer", "the-golden"]
    assert [there.find("latest", kind)[0].name for kind in KINDS] == ["newer", "last"]
    fed = {run.tags["inputs_from"] for run in there.runs("candidate")}
    assert fed == {there.find("the-golden")[0].id}
    ended = cli("job=compare", "golden=the-golden", "candidate=last", "tracking.folder=there")
    assert ended.exit in (0, 4), ended.err
    nothing = cli("job=export", "run=all", "tracking.folder=void")
    assert nothing.exit == 2 and "No golden or candidate run in" in nothing.err


def test_a_store_moves_with_its_folder(cli: Cli, tmp_path: Path) -> None:
    store = fresh_store(tmp_path / "home")
    golden = kept(store, "golden", "the-golden", fingerprint="f")
    kept(store, "candidate", "the-candidate", inputs_from=golden.id)
    compared = cli("job=compare", "tracking.folder=home")
    assert compared.exit in (0, 4), compared.err
    (tmp_path / "home").rename(tmp_path / "moved")
    again = cli("job=compare", "tracking.folder=moved")
    assert again.exit == compared.exit and not (tmp_path / "home").exists()
    judged = cli("job=judge", "tracking.folder=moved")
    assert judged.exit == compared.exit, judged.err
    listed = cli("job=runs", "tracking.folder=moved")
    assert "5 runs" in listed.out and "the-candidate" in listed.out
    there = fresh_store(tmp_path / "moved")
    for run in there.runs():
        assert run.folder.is_relative_to(tmp_path / "moved") and run.folder.is_dir()
    found = there.by_fingerprint("f")
    assert found is not None and found.id == golden.id
    mark = found.read_manifest().fingerprint
    there.tag(found, {"fingerprint": mark})
    reused = reusable(there, mark)
    assert reused is not None and reused.id == golden.id


KINDS = ("golden", "candidate")


@pytest.mark.parametrize("to", ["carried.zip", "carried"])
def test_an_export_is_compared_as_it_is(cli: Cli, home: Home, to: str) -> None:
    for run in KINDS:
        assert cli("job=export", home.store, f"run=the-{run}", f"to={run}-{to}").exit == 0
    sides = [f"{run}={'./' if to == 'carried' else ''}{run}-{to}" for run in KINDS]
    ended = cli("job=compare", "tracking.folder=fresh", *sides)
    assert ended.exit in (0, 4), ended.err
    assert "golden:    the-golden" in ended.out and "candidate: the-candidate" in ended.out


def test_one_file_is_both_sides(cli: Cli, home: Home, archive: Path) -> None:
    words = (f"golden={archive}", f"candidate={archive}", "tracking.folder=fresh")
    ended = cli("job=compare", *words)
    assert "golden:    the-golden" in ended.out and "candidate: the-candidate" in ended.out


def test_what_is_no_run_is_not_exported(cli: Cli, home: Home) -> None:
    for words, said in (
        ((), "job=export wants to know what"),
        (("run=broken",), "is a golden that is failed"),
        (("run=the-golden", "job.golden=true"), "No golden run is kept that 'the-golden' was fed"),
        (("run=absent",), "There is no run 'absent'"),
    ):
        ended = cli("job=export", home.store, *words)
        assert ended.exit == 2 and said in ended.err, ended.err
    for words, said in (
        ((), "job=import wants to know what"),
        (("run=absent.zip",), "There is no "),
        ((f"run={home.golden.folder}",), "is no export"),
    ):
        ended = cli("job=import", "tracking.folder=fresh", *words)
        assert ended.exit == 2 and said in ended.err, ended.err


def test_an_export_that_was_stopped_leaves_nothing(home: Home, tmp_path: Path) -> None:
    def stop(name: str) -> None:
        raise KeyboardInterrupt

    before = {*tmp_path.iterdir()}
    for to in ("half.zip", "half"):
        with pytest.raises(KeyboardInterrupt):
            write_export([home.golden], tmp_path / to, stop)
    assert {*tmp_path.iterdir()} == before


def test_what_a_killed_export_of_the_same_number_left_is_in_no_ones_way(
    home: Home, tmp_path: Path
) -> None:
    """In containers every command may be process 1."""
    for to in ("whole.zip", "whole"):
        (tmp_path / f".{to}.{os.getpid()}.part").mkdir()
        write_export([home.golden], tmp_path / to, lambda name: None)
        assert is_export(tmp_path / to)


def rewrite(path: Path, change: Callable[[dict[str, bytes], dict[str, Any]], None]) -> None:
    """Change an archive's files, by name, and what its list says; the list is written last."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    listing = json.loads(files.pop(FILE))
    change(files, listing)
    files.setdefault(FILE, json.dumps(listing).encode())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def listed_too(name: str) -> Callable[[dict[str, bytes], dict[str, Any]], None]:
    """Return a change that adds a file to the golden run, with its right size and hash."""

    def change(files: dict[str, bytes], listing: dict[str, Any]) -> None:
        golden = listing["runs"][0]
        golden["files"][name] = {"bytes": 2, "sha256": sha256(b"{}").hexdigest()}
        files[f"runs/{golden['id']}/{name}"] = b"{}"

    return change


def flipped(files: dict[str, bytes], listing: dict[str, Any]) -> None:
    name = next(name for name in files if name.endswith(".safetensors"))
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])


def no_manifest(files: dict[str, bytes], listing: dict[str, Any]) -> None:
    golden = listing["runs"][0]
    del golden["files"][MANIFEST], files[f"runs/{golden['id']}/{MANIFEST}"]


def other_manifest(files: dict[str, bytes], listing: dict[str, Any]) -> None:
    golden = listing["runs"][0]
    name = f"runs/{golden['id']}/{MANIFEST}"
    files[name] = files[name].replace(b'"device": "cpu"', b'"device": "gpu"')
    golden["files"][MANIFEST]["sha256"] = sha256(files[name]).hexdigest()


CHANGES = {
    "up": (lambda files, _: files.update({"../evil.json": b"{}"}), "cannot be below its folder"),
    "absolute": (lambda files, _: files.update({"/evil.json": b"{}"}), "cannot be below"),
    "backslash": (lambda files, _: files.update({"a\\..\\b.json": b"{}"}), "cannot be below"),
    "listed up": (listed_too("../../evil.json"), "cannot be below its folder"),
    "hidden": (listed_too(".progress"), "cannot be below its folder"),
    "a page": (listed_too("report.html"), "report.html is none of .safetensors"),
    "a pickle": (listed_too("tensors/x.pt"), "x.pt is none of .safetensors"),
    "unlisted": (lambda files, _: files.update({"more.json": b"{}"}), "not as large as listed"),
    "lost": (lambda files, _: files.popitem(), "not there"),
    "flipped": (flipped, "is not the one exported"),
    "no manifest": (no_manifest, "has no manifest.json"),
    "other manifest": (other_manifest, "manifest.json is damaged"),
    "no list": (lambda files, _: files.update({FILE: b"{"}), "export.json: "),
    "deep list": (lambda files, _: files.update({FILE: b"[" * 100_000}), "export.json: "),
    "no run": (lambda _, listing: listing.update(runs=[]), "lists no run"),
    "an id": (lambda _, listing: listing["runs"][0].update(id="../x"), "lists something else"),
    "a kind": (lambda _, listing: listing["runs"][0]["tags"].update(kind="x"), "something else"),
    "newer": (lambda _, listing: listing.update(format=2), "by a newer layerparity"),
}


def refused(store: Store, path: Path, said: str) -> None:
    """Assert that an export is neither imported nor compared, and leaves nothing anywhere."""
    around = {*path.parent.rglob("*")}
    with pytest.raises(UserError, match=re.escape(said)):
        import_runs(store, path, lambda manifest, files: [])
    with pytest.raises(UserError, match=re.escape(said)):
        # A manifest is held against its hash when a comparison reads it.
        [run.read_manifest() for run in store.find(str(path))]
    assert store.runs() == []
    assert {*path.parent.rglob("*")} == around


@pytest.mark.parametrize("name", CHANGES)
def test_an_archive_that_was_tampered_with_is_refused(
    empty: Store, archive: Path, name: str
) -> None:
    change, said = CHANGES[name]
    rewrite(archive, change)
    refused(empty, archive, said)


@pytest.mark.parametrize("name", ["config.yaml", MANIFEST])
def test_a_damaged_file_is_called_as_in_the_archive(
    cli: Cli, empty: Store, archive: Path, name: str
) -> None:
    def spoil(files: dict[str, bytes], listing: dict[str, Any]) -> None:
        golden, text = listing["runs"][0], b"a: ["
        files[f"runs/{golden['id']}/{name}"] = text
        golden["files"][name] = {"bytes": len(text), "sha256": sha256(text).hexdigest()}
        member.append(f"runs/{golden['id']}/{name}")

    member: list[str] = []
    rewrite(archive, spoil)
    refused(empty, archive, f"{archive} is no sound export ({member[0]} is damaged: ")
    for words in (("job=import", f"run={archive}"), ("job=compare", f"golden={archive}")):
        ended = cli(*words, f"tracking.folder={empty.config.root}")
        assert ended.exit == 2
        assert f"{archive} is no sound export ({member[0]} is damaged: " in ended.err
        assert "cache" not in ended.err and ended.err.count("\n") == 1


def link(archive: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo("link.json")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(entry, "/etc/passwd")


def device(archive: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo("device.json")
    entry.external_attr = (stat.S_IFCHR | 0o666) << 16
    archive.writestr(entry, "")


def deflated_bomb(archive: zipfile.ZipFile) -> None:
    archive.writestr("bomb.json", b"0" * (1 << 24), zipfile.ZIP_DEFLATED)


def claims(archive: zipfile.ZipFile) -> None:
    # All its entries begin in the same place, as in an archive of overlapping files.
    for entry in archive.filelist:
        entry.header_offset = 0
        entry.file_size = entry.compress_size = 1 << 30


def nameless(archive: zipfile.ZipFile) -> None:
    archive.writestr("?", b"")
    archive.filelist[-1].filename = ""


def twice(archive: zipfile.ZipFile) -> None:
    with pytest.warns(UserWarning):
        archive.writestr(archive.filelist[0].filename, b"{}")


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (link, "link.json is a link or a device"),
        (device, "device.json is a link or a device"),
        (deflated_bomb, "bomb.json is compressed"),
        (claims, "it says that it holds "),
        (twice, "is there twice"),
        (nameless, "cannot be below its folder, ''"),
    ],
)
def test_an_archive_with_a_link_a_device_or_a_bomb_is_refused(
    empty: Store, archive: Path, add: Callable[[zipfile.ZipFile], None], said: str
) -> None:
    with zipfile.ZipFile(archive, "a") as opened:
        add(opened)
        opened._didModify = True  # type: ignore[attr-defined]
    refused(empty, archive, said)


def test_an_archive_whose_names_are_no_letters_is_refused(empty: Store, archive: Path) -> None:
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr("\u00e9.json", b"{}")
    # Marked as UTF-8, which these are not.
    archive.write_bytes(archive.read_bytes().replace("\u00e9".encode(), b"\xff\xfe"))
    refused(empty, archive, "can't decode byte")


def test_a_folder_that_lists_what_no_disk_can_name_is_refused(
    empty: Store, home: Home, tmp_path: Path
) -> None:
    write_export([home.golden], tmp_path / "carried", lambda name: None)
    listed = tmp_path / "carried" / FILE
    listing = json.loads(listed.read_text(encoding="utf-8"))
    # 245 letters of two bytes, where a name may have 255 bytes.
    listing["runs"][0]["files"]["\u00e9" * 240 + ".json"] = {"bytes": 2, "sha256": ""}
    listed.write_text(json.dumps(listing), encoding="utf-8")
    refused(empty, tmp_path / "carried", "is not there, a link, or no plain file")


def test_a_run_named_in_another_script_is_exported_to_a_file(
    cli: Cli, tmp_path: Path, home: Home
) -> None:
    store = fresh_store(tmp_path / "named")
    run = kept(store, "golden", "\u91d1")
    ended = cli("job=export", f"tracking.folder={tmp_path / 'named'}", "run=latest")
    assert ended.exit == 0, ended.err
    # A name of none of the usual letters leaves nothing but the ending, which is a hidden folder.
    name = f"golden-{run.id[:8]}.zip"
    assert f"job=import run={name}" in ended.out and zipfile.is_zipfile(name)


@pytest.mark.parametrize("key", ["run", "golden"])
@pytest.mark.parametrize("ending", ["", ".zip", "/x"])
def test_a_word_too_long_for_a_path_is_no_run(cli: Cli, key: str, ending: str) -> None:
    job = "import" if key == "run" else "compare"
    ended = cli(f"job={job}", f"{key}={'a' * 300}{ending}", "tracking.folder=fresh")
    assert ended.exit == 2, ended.err
    assert "There " in ended.err and "Traceback" not in ended.err


def test_an_archive_that_is_cut_off_is_refused(cli: Cli, archive: Path) -> None:
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    ended = cli("job=import", f"run={archive}", "tracking.folder=refusing")
    assert ended.exit == 2 and "is no export" in ended.err


@pytest.mark.parametrize("what", ["file", "parent", "pipe", "list", "loop"])
def test_a_folder_with_links_is_refused(
    empty: Store, home: Home, tmp_path: Path, what: str
) -> None:
    write_export([home.golden], tmp_path / "carried", lambda name: None)
    tensors = tmp_path / "carried" / "runs" / home.golden.id / "tensors"
    (tmp_path / "elsewhere").mkdir()
    if what == "file":
        one = sorted(tensors.iterdir())[0]
        one.rename(tmp_path / "elsewhere" / one.name)
        one.symlink_to(tmp_path / "elsewhere" / one.name)
    elif what == "parent":
        tensors.rename(tmp_path / "elsewhere" / "tensors")
        tensors.symlink_to(tmp_path / "elsewhere" / "tensors")
    elif what == "pipe":
        one = sorted(tensors.iterdir())[0]
        one.unlink()
        os.mkfifo(one)
    elif what == "loop":
        one = sorted(tensors.iterdir())[0]
        one.unlink()
        one.symlink_to(one.name)
    else:
        listed = tmp_path / "carried" / FILE
        listed.rename(tmp_path / "elsewhere" / FILE)
        listed.symlink_to(tmp_path / "elsewhere" / FILE)
    refused(empty, tmp_path / "carried", "is not there, a link, or no plain file")


def test_an_import_that_is_stopped_shows_no_run(
    cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest, which makes a folder a run, is the last file; a stop before it leaves none."""
    seen: list[str] = []
    unpack(archive, tmp_path / "aside", seen.append)
    assert [name for name in seen if name == MANIFEST] == [MANIFEST] * 2 and seen[-1] == MANIFEST
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if Path(target).name == "weights.json":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    ended = cli("job=import", f"run={archive}", "tracking.folder=full")
    assert ended.exit == 2 and "No space left on device" in ended.err
    monkeypatch.undo()
    (run,) = fresh_store(tmp_path / "full").runs()
    assert run.status == "FAILED" and not RunFolder(run.folder).is_run


def test_two_imports_at_once_take_each_run_once(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looked = fresh_store(tmp_path / "both"), Event()
    known, start = imports.known_as, Store.start

    def take() -> list[bool]:
        return [each.fresh for each in imports.import_runs(store, archive, lambda *_: ())]

    def looking(*given: Any) -> Any:
        if current_thread() is not main_thread():
            looked.set()
        return known(*given)

    def second_begins(*given: Any, **more: Any) -> Any:
        if not second:
            second.append(pool.submit(take))
            # It looks what is there, unless it waits for this one.
            looked.wait(timeout=2)
        return start(*given, **more)

    second: list[Future[list[bool]]] = []
    monkeypatch.setattr(imports, "known_as", looking)
    monkeypatch.setattr(Store, "start", second_begins)
    with ThreadPoolExecutor(1) as pool:
        assert take() == [True, True]
        assert second[0].result(timeout=300) == [False, False]
    assert len(store.runs()) == 2
