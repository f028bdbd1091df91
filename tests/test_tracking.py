"""Tracking: runs end as they should, are found by what a person types, and stores fail politely."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
from stores import free_port, fresh_config, fresh_store

from layerparity.ground.errors import UserError
from layerparity.settings.tracking import UI_FILE, TrackingConfig, read_config
from layerparity.tracking import database, interrupted, names
from layerparity.tracking.opening import open_store
from layerparity.tracking.process import terminable
from layerparity.tracking.view import shared_view


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A store for tests that do not mind what else is in it."""
    return fresh_store(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def store(tmp_path):
    return fresh_store(tmp_path / "runs")


def make(store, name, kind="golden", parent=None, **tags):
    with store.start(name, kind, tags, {}, parent=parent) as run:
        (run.folder / "tensors.bin").write_bytes(name.encode())
    return run


def history(store, run_id, name):
    points = store._connection.client.get_metric_history(run_id, name)
    return {point.step: point.value for point in points}


def raw_run(store, run_id):
    return store._connection.client.get_run(run_id)


# How a run ends.


def test_a_run_keeps_its_tags_parameters_points_and_files_in_place(store):
    params = {"model": {"name": "m", "layers": [1, 2]}, "none": None, "long": "x" * 9000}
    with store.start("first", "golden", {"backend": "gpu"}, params) as run:
        run.log_metrics([("layer/mlp[0]", layer / 2, layer) for layer in range(3)])
        run.set_tags({"verdict": "pass", "mlflow.note.content": "note"})
        (run.folder / "tensors.bin").write_bytes(b"1234")
        inode = (run.folder / "tensors.bin").stat().st_ino
    found = store.get(run.id)
    assert (found.name, found.status, found.kind) == ("first", "FINISHED", "golden")
    assert found.tags["backend"] == "gpu" and found.tags["verdict"] == "pass"
    assert found.url == run.url
    assert (found.folder / "tensors.bin").stat().st_ino == inode, "tensors were copied"
    assert found.file("tensors.bin").read_bytes() == b"1234"
    assert found.folder.is_relative_to(store.config.root / "artifacts")
    data = raw_run(store, run.id).data
    assert data.params["model.layers"] == "[1, 2]" and data.params["none"] == "null"
    assert data.params["long"].endswith("(whole in config.yaml)")
    assert data.tags["mlflow.note.content"] == "note"
    assert history(store, run.id, "layer/mlp_0_") == {0: 0.0, 1: 0.5, 2: 1.0}


def test_an_exception_ends_the_run_as_failed_and_says_why(shared):
    with pytest.raises(ZeroDivisionError), shared.start("bad", "golden", {}, {}) as run:
        raise ZeroDivisionError("first line\nsecond line")
    found = shared.get(run.id)
    assert found.status == "FAILED" and not found.finished
    assert found.tags["error"] == "ZeroDivisionError: first line"


def test_sigterm_ends_the_run_as_killed_and_gives_the_handler_back(shared):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, shared.start("stopped", "golden", {}, {}) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert ended.value.code == 143
    assert shared.get(run.id).status == "KILLED"
    assert shared.get(run.id).tags["error"] == "stopped by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_ends_the_run_as_killed(shared):
    with pytest.raises(KeyboardInterrupt), shared.start("stopped", "golden", {}, {}) as run:
        raise KeyboardInterrupt
    assert shared.get(run.id).status == "KILLED"


def test_a_second_sigterm_does_not_cut_the_closing_short():
    with pytest.raises(SystemExit), terminable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)


def test_two_runs_may_be_fed_the_same_at_the_same_moment(store, monkeypatch):
    """MLflow looks for a dataset, then adds it; another process may add it in between."""
    from mlflow.store.tracking import sqlalchemy_store

    fed = ("prompt 1x8", "0123", {"inputs": "prompt"})
    late, ids = store.begin("late", "candidate", {}, {}), sqlalchemy_store.uuid

    def first_another(*_: object) -> object:
        monkeypatch.setattr(sqlalchemy_store, "uuid", ids)
        store.begin("early", "candidate", {}, {}).log_input(*fed)
        return ids.uuid4()

    monkeypatch.setattr(sqlalchemy_store, "uuid", SimpleNamespace(uuid4=first_another))
    late.log_input(*fed)
    kept = [store._connection.client.get_run(run.id).inputs for run in store.runs()]
    digests = [[each.dataset.digest for each in inputs.dataset_inputs] for inputs in kept]
    assert digests == [["0123"], ["0123"]]


def test_commands_may_set_one_tag_of_one_run_at_the_same_moment(store):
    """As those do that find one abandoned run at once; MLflow's set_tag fails for all but one."""
    runs, four = [make(store, f"r{number}") for number in range(8)], Barrier(4)

    def mark(number: int) -> None:
        for run in runs:
            four.wait(timeout=200)
            store.tag(run, {"one": number, "two": number, "three": number})

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(mark, range(4))) == [None] * 4
    for run in runs:
        tags = store.get(run.id).tags
        assert {tags[name] for name in ("one", "two", "three")} <= set("0123")


def test_two_commands_may_give_an_experiment_its_view_at_the_same_moment(store, monkeypatch):
    """MLflow looks for the tag, then adds it; another ``job=ui`` may add it in between."""
    from sqlalchemy import event
    from sqlalchemy.orm import Session

    link, tag = store._connection, next(iter(shared_view()))
    with closing(sqlite3.connect(store.config.root / "mlflow.db")) as other, other:
        other.execute("DELETE FROM experiment_tags WHERE key = ?", (tag,))

    flushed = []

    def first_another(*_: object) -> None:
        flushed.append(tag)
        if len(flushed) == 1:
            assert open_store(store.config).runs_url.startswith("http")

    event.listen(Session, "before_flush", first_another)
    try:
        assert store.runs_url.startswith("http")
    finally:
        event.remove(Session, "before_flush", first_another)
    assert link.client.get_experiment(link.experiment_id).tags[tag] == shared_view()[tag]


def test_a_request_that_others_make_fail_every_time_is_not_made_for_ever(store):
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2 as errors

    tries = []

    def refused(number: int, *, error: str) -> None:
        tries.append(number)
        raise MlflowException("UNIQUE constraint failed", getattr(errors, error))

    for error, times in (("BAD_REQUEST", 4), ("INTERNAL_ERROR", 1)):
        with pytest.raises(MlflowException, match="UNIQUE"):
            store._connection.insist(refused, times, error=error)
    assert tries == [4, 4, 4, 4, 1]


def test_a_run_that_was_deleted_while_it_is_used_is_named(store, capsys):
    """In MLflow's pages, or by job=gc in another process: no story of MLflow's code."""
    running, ended = store.begin("running", "golden", {}, {}), make(store, "ended")
    lost = replace(store.get(running.id), status="INTERRUPTED")
    ended = store.get(ended.id)
    for run in (running, ended):
        store._connection.client.delete_run(run.id)
    said = f"Run {running.id[:8]} was deleted in {store.config.root} while this command used it"
    with pytest.raises(UserError, match=said):
        running.log_metrics([("layer/x", 1.0, 0)])
    with pytest.raises(UserError, match=said):
        running.end()
    with pytest.raises(UserError, match=f"Run {ended.id[:8]} was deleted"):
        store.tag(ended, {"verdict": "pass"})
    interrupted.end_abandoned(store._connection, [lost])
    assert "could not be marked so: Run" in capsys.readouterr().out
    store._connection.client.delete_experiment(store._connection.experiment_id)
    with pytest.raises(UserError, match="Experiment 1 was deleted"):
        store.begin("later", "golden", {}, {})


def test_nonfinite_points_are_counted_not_stored(shared):
    with shared.start("nan", "golden", {}, {}) as run:
        points = [("layer/x", math.nan, 0), ("layer/x", math.inf, 1), ("layer/x", 2.0, 2)]
        run.log_metrics(points)
        run.log_metrics([("layer/x", -math.inf, 3)])
    assert history(shared, run.id, "layer/x") == {2: 2.0}
    assert shared.get(run.id).tags["nonfinite"] == "3"


def test_points_and_tags_share_requests_that_mlflow_takes(store, monkeypatch):
    sent = []
    with store.start("many", "golden", {}, {}) as run:
        original = run.connection.client.log_batch

        def log_batch(run_id, metrics=(), params=(), tags=(), **more):
            sent.append((len(metrics), len(tags)))
            return original(run_id, metrics=metrics, params=params, tags=tags, **more)

        monkeypatch.setattr(run.connection.client, "log_batch", log_batch)
        run.log_metrics([("layer/x", 0.5, 0), ("layer/x", math.nan, 1)], {"device": "cpu"})
        assert sent == [(1, 2)], "the tags are the device, and how many points are no numbers"
        run.log_metrics([("layer/y", 1.0, step) for step in range(1000)], {"facts": "two"})
        tags = {f"t{number:03d}": number for number in range(150)}
        run.set_tags(tags)
        run.log_metrics([])
    # MLflow takes 1000 of all kinds together, 100 of them tags.
    assert sent[1:] == [(900, 1), (100, 0), (0, 100), (0, 50)]
    found = store.get(run.id).tags
    assert found["device"] == "cpu" and found["facts"] == "two" and found["nonfinite"] == "1"
    assert {name: found[name] for name in tags} == {name: str(n) for name, n in tags.items()}
    assert len(history(store, run.id, "layer/y")) == 1000


def test_tables_are_written_as_the_ui_reads_them(shared):
    with shared.start("pages", "comparison", {}, {}) as run:
        run.log_table({"site": ["a", "b"], "error": [1.0, math.nan]}, "rows.json")
    table = json.loads((run.folder / "rows.json").read_text())
    assert table == {"columns": ["site", "error"], "data": [["a", 1.0], ["b", "nan"]]}
    tags = raw_run(shared, run.id).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "rows.json", "type": "table"}]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("layer/mlp.gate:logits", "layer/mlp.gate:logits"),
        ("lm_head:out@decode.3", "lm_head:out_decode.3"),
        ("/a//b/", "a/b"),
        ("../../x", "x"),
        ("..x", "_..x"),
        ("", "_"),
    ],
)
def test_names_become_what_mlflow_accepts(name, accepted):
    validation = pytest.importorskip("mlflow.utils.validation")
    assert names.clean(name) == accepted
    validation._validate_metric_name(names.clean(name))


def test_long_names_stay_apart():
    one, two = names.clean("x" * 300 + "a"), names.clean("x" * 300 + "b")
    assert one != two and len(one) == names.MAX_NAME


# How a run is found.


def test_find_by_id_prefix_name_latest_and_folder(store):
    first, second = make(store, "same"), make(store, "same")
    make(store, "other", kind="candidate")
    assert [run.id for run in store.find(first.id)] == [first.id]
    assert [run.id for run in store.find(first.id[:8])] == [first.id]
    assert [run.id for run in store.find("same")] == [second.id], "the newest so called"
    assert [run.id for run in store.find("latest", kind="golden")] == [second.id]
    assert [run.name for run in store.find("latest")] == ["other"]
    (bare,) = store.find(str(first.folder))
    assert (bare.id, bare.folder, bare.status) == ("", first.folder, "FINISHED")


def test_a_run_is_taken_before_a_folder_of_its_name_and_said(store, tmp_path, monkeypatch, capsys):
    run = make(store, "both")
    monkeypatch.chdir(tmp_path)
    for name in ("both", "only", "latest"):
        (tmp_path / name).mkdir()
    assert [each.id for each in store.find("both")] == [run.id]
    assert "'both' is taken as the run; the folder here is ./both" in capsys.readouterr().out
    assert [each.id for each in store.find("latest")] == [run.id]
    assert "./latest" in capsys.readouterr().out
    assert [each.folder for each in store.find("only")] == [tmp_path / "only"]
    assert [each.folder for each in store.find("./both")] == [tmp_path / "both"]
    assert capsys.readouterr().out == ""


def test_links_lead_where_the_ui_was_last_served(store):
    run = make(store, "seen")
    assert store.find(run.id)[0].url.startswith("http://127.0.0.1:5000/#/")
    (store.config.root / UI_FILE).write_text("http://127.0.0.1:5017\n")
    assert store.find(run.id)[0].url.startswith("http://127.0.0.1:5017/#/")
    server = TrackingConfig(name="server", uri="http://there:80/", folder=store.config.folder)
    assert server.address == "http://there:80"


def test_find_says_what_is_there_instead(store, tmp_path):
    with pytest.raises(UserError, match=r"There are no runs in .*python run\.py backend=gpu"):
        store.find("latest", kind="golden")
    make(store, "golden-full")
    with pytest.raises(UserError, match=r"no run 'goldn-full'.*Did you mean 'golden-full'\?"):
        store.find("goldn-full")
    for name in ("a", "b", "c", "d"):
        make(store, name)
    with pytest.raises(UserError, match=r"no run 'zzz'.* Newest: 'd', 'c', 'b', 'a'; 'python run"):
        store.find("zzz")
    with pytest.raises(UserError, match="no finished candidate run"):
        store.find("latest", kind="candidate")
    with pytest.raises(UserError, match="There is no folder"):
        store.find(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="There is no folder ~nobody-of-this-name/run"):
        store.find("~nobody-of-this-name/run")
    (tmp_path / "file.npy").touch()
    with pytest.raises(UserError, match="is a file"):
        store.find(str(tmp_path / "file.npy"))


def test_an_ambiguous_id_names_both(store, monkeypatch):
    first, second = make(store, "a"), make(store, "b")
    monkeypatch.setattr("layerparity.tracking.lookup.id_starts", lambda prefix: "status != 'X'")
    with pytest.raises(UserError, match="begins the ids") as told:
        store.find("abcd")
    assert first.id in str(told.value) and second.id in str(told.value)


def test_a_name_of_the_asked_kind_comes_first(store):
    golden = make(store, "mine", kind="golden")
    make(store, "mine", kind="candidate")
    assert store.find("mine", kind="golden")[0].id == golden.id


def test_what_a_job_made_for_itself_is_not_the_latest(store):
    mine = make(store, "mine")
    swept = make(store, "sweep", kind="sweep")
    part = make(store, "part", kind="candidate", parent=swept.id)
    bisection = make(store, "bisect-mine", kind="bisection")
    helpers = [make(store, f"h{n}", parent=bisection.id) for n in range(4)]
    other = make(store, "other", kind="candidate", parent=bisection.id)
    assert [run.id for run in store.find("latest", kind="golden")] == [mine.id]
    assert [run.id for run in store.find("latest", kind="candidate")] == [part.id]
    assert [run.id for run in store.own_runs("golden", limit=1)] == [mine.id]
    assert [run.id for run in store.own_runs("candidate")] == [part.id]
    assert store.find(helpers[0].id)[0].id == helpers[0].id
    assert store.find(other.name, kind="candidate")[0].id == other.id
    orphan = make(store, "orphan", parent="0" * 32)
    assert store.find("latest", kind="golden")[0].id == orphan.id


def test_a_failed_run_is_found_by_name_but_is_not_the_latest(store):
    good = make(store, "twice")
    with pytest.raises(ValueError), store.start("twice", "golden", {}, {}):
        raise ValueError
    assert store.find("twice")[0].status == "FAILED"
    assert store.find("latest", kind="golden")[0].id == good.id


@pytest.mark.parametrize(
    "name",
    [
        "it's",
        'say "x"',
        "both ' and \"",
        "back\\",
        "100%",
        "a;b",
        "layer=range(0,6)",
        "ü 名",
        "-- x",
    ],
)
def test_any_name_can_be_found(shared, name):
    run = make(shared, name, fingerprint=name)
    make(shared, name[:-1] + "~")
    assert [each.id for each in shared.find(name)] == [run.id]
    assert shared.by_fingerprint(name).id == run.id


def test_newest_and_fingerprints_see_finished_runs_only(store):
    good = make(store, "one", model="m", fingerprint="f" * 64)
    make(store, "two", model="other")
    with pytest.raises(ValueError), store.start("x", "golden", {"fingerprint": "f" * 64}, {}):
        raise ValueError
    assert store.newest("golden").id != good.id
    assert store.newest("candidate") is None
    assert store.by_fingerprint("f" * 64).id == good.id
    assert store.by_fingerprint("0" * 64) is None


# Sweeps as sets of runs.


def test_a_run_is_newer_than_one_that_was_deleted(store):
    first, second = (make(store, name) for name in ("first", "second"))
    counts = [store.get(run.id).sequence for run in (first, second)]
    store.delete(store.get(second.id))
    assert counts[0] < counts[1] < store.get(make(store, "third").id).sequence


def test_what_is_asked_of_a_database_that_is_gone_makes_none(store):
    (store.config.root / "mlflow.db").rename(store.config.root / "elsewhere.db")
    with pytest.raises(UserError, match="was removed, moved or unmounted while this command ran"):
        store.counted()
    assert not (store.config.root / "mlflow.db").exists()


def test_a_sweep_is_its_finished_children_in_natural_order(store):
    parent = store.begin("all layers", "sweep", {}, {})
    made = {n: make(store, f"layer {n}", "candidate", parent.id) for n in (10, 9, 1)}
    with pytest.raises(ValueError), store.start("layer 2", "candidate", {}, {}, parent=parent.id):
        raise ValueError
    parent.end("FAILED")
    expected = [made[n].id for n in (1, 9, 10)]
    assert [run.id for run in store.find("all layers")] == expected
    assert [run.id for run in store.find("latest", kind="candidate")] == expected
    assert [run.status for run in store.children(parent.id)].count("FAILED") == 1
    assert all(run.parent == parent.id for run in store.find(parent.id))


def test_a_sweep_of_both_kinds_gives_the_asked_kind(store):
    parent = store.begin("both", "sweep", {}, {})
    make(store, "g", "golden", parent.id)
    make(store, "c", "candidate", parent.id)
    assert [run.name for run in store.find("both", kind="golden")] == ["g"]
    assert [run.name for run in store.find("both")] == ["c", "g"]


def test_a_sweep_without_finished_children_says_so(store):
    store.begin("empty", "sweep", {}, {}).end("FAILED")
    with pytest.raises(UserError, match="None of the 0 runs of the sweep 'empty' finished"):
        store.find("empty")


def test_the_parent_shows_its_childrens_layers(store):
    parent = store.begin("all", "sweep", {}, {})
    for layer in range(3):
        with store.start(f"layer {layer}", "candidate", {}, {}, parent=parent.id) as child:
            child.log_metrics([("layer/x", layer + 0.5, layer), ("summary/seconds", 1.0, 0)])
    assert history(store, parent.id, "layer/x") == {0: 0.5, 1: 1.5, 2: 2.5}
    assert history(store, parent.id, "summary/seconds") == {}


def test_a_reused_run_is_adopted_with_its_series(store):
    with store.start("old", "candidate", {}, {}) as old:
        old.log_metrics([("layer/x", 7.0, 4), ("summary/seconds", 1.0, 0)])
    parent = store.begin("new sweep", "sweep", {}, {})
    store.adopt(parent.id, store.get(old.id))
    new = make(store, "new", "candidate", parent.id)
    found = store.find("new sweep")
    assert {run.id for run in found} == {old.id, new.id}
    assert {run.parent for run in found} == {parent.id}
    assert history(store, parent.id, "layer/x") == {4: 7.0}
    assert history(store, parent.id, "summary/seconds") == {}


# Stores that cannot be used.


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"is not a folder.*tracking.folder"):
        open_store(TrackingConfig(folder=str(tmp_path / "runs")))


def test_a_file_that_is_no_database_is_answered_at_once(tmp_path):
    (tmp_path / database.FILE_NAME).write_text("not a database " * 100)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"cannot be used.*not a database.*tracking.folder"):
        open_store(TrackingConfig(folder=str(tmp_path)))
    assert time.monotonic() - began < 300, "MLflow retried it"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_to():
    with pytest.raises(UserError, match=r"Cannot write to /proc/runs .*tracking.folder"):
        open_store(TrackingConfig(folder="/proc/runs"))


def test_a_database_that_cannot_be_written_to(tmp_path, monkeypatch):
    config = fresh_config(tmp_path)
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda path, **kw: connect(f"file:{path}?mode=ro", uri=True, **kw),
    )
    with pytest.raises(UserError, match="cannot be written to: change its permissions"):
        open_store(config)


def test_a_store_of_a_newer_mlflow_is_named_with_both_versions(tmp_path):
    config = fresh_config(tmp_path)
    with sqlite3.connect(tmp_path / database.FILE_NAME) as base:
        base.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        base.execute(
            "INSERT INTO runs (run_uuid, start_time, lifecycle_stage, experiment_id) "
            "VALUES ('r', 1, 'active', 0)"
        )
        base.execute("INSERT INTO tags VALUES ('layerparity.version.mlflow', '99.1.0', 'r')")
    base.close()
    with pytest.raises(UserError, match="a newer version of MLflow made their data") as said:
        open_store(config)
    assert "(schema ffffffffffff; its newest run was kept by MLflow 99.1.0)" in said.value.found
    assert said.value.found.endswith(f"this is MLflow {version('mlflow')}")
    assert said.value.cure.startswith("install that version, or")


def test_a_store_of_an_older_mlflow_is_refused_and_not_upgraded(tmp_path):
    """Where one of its own tables is not there, MLflow would migrate the store without a word."""
    config = fresh_config(tmp_path)
    old = "bd07f7e963c5"
    path = tmp_path / database.FILE_NAME
    with sqlite3.connect(path) as base:
        base.execute("UPDATE alembic_version SET version_num = ?", (old,))
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
        lost = next(name for name in sorted(tables) if name.startswith("trace"))
        base.execute(f"DROP TABLE {lost}")
    base.close()
    with pytest.raises(UserError, match=f"an older version of MLflow made .*schema {old}") as said:
        open_store(config)
    assert f"run 'mlflow db upgrade sqlite:///{path}' with this one, or install" in said.value.cure
    with sqlite3.connect(path) as base:
        assert base.execute("SELECT version_num FROM alembic_version").fetchone() == (old,)
        assert not base.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (lost,)).fetchone()
    base.close()


def test_a_path_that_no_address_can_hold(tmp_path):
    with pytest.raises(UserError, match="free of"):
        open_store(TrackingConfig(folder=str(tmp_path / "50%")))


def test_a_path_with_spaces_quotes_and_letters(tmp_path):
    store = fresh_store(tmp_path / "it's ü runs")
    run = make(store, "x")
    assert store.get(run.id).folder == run.folder
    assert run.folder.is_relative_to(tmp_path / "it's ü runs")


def test_a_deleted_experiment_says_how_to_get_it_back(tmp_path):
    config = fresh_config(tmp_path, experiment="gone")
    link = open_store(config)._connection
    link.client.delete_experiment(link.experiment_id)
    with pytest.raises(UserError, match="'gone' was deleted"):
        open_store(config)


def test_an_interrupted_first_start_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def stopped(uri):
        Path(uri.removeprefix("sqlite:///")).write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "runs").mkdir()
    with pytest.raises(KeyboardInterrupt):
        database.make(tmp_path / "runs", stopped)
    assert list((tmp_path / "runs").iterdir()) == []
    assert not list(tmp_path.glob("cache/layerparity/stores/*.db"))


def test_a_moved_store_keeps_working(tmp_path):
    old = fresh_store(tmp_path / "here")
    run = make(old, "carried over")
    (tmp_path / "here").rename(tmp_path / "there")
    new = open_store(TrackingConfig(folder=str(tmp_path / "there")))
    assert new.find("carried over")[0].folder == (
        tmp_path / "there" / run.folder.relative_to(tmp_path / "here")
    )
    assert make(new, "second").folder.is_relative_to(tmp_path / "there")
    assert not (tmp_path / "here").exists()


def test_gone_artifacts_are_named(store):
    run = make(store, "x")
    run.folder.rename(run.folder.with_name("elsewhere"))
    with pytest.raises(UserError, match=f"artifacts of run {run.id} are gone"):
        _ = store.get(run.id).folder


def test_sqlite_is_in_wal_mode(store):
    with sqlite3.connect(store.config.root / database.FILE_NAME) as base:
        assert base.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    base.close()


# Servers.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "server"}, "needs its address"),
        ({"name": "server", "uri": "ftp://x"}, "needs its address"),
        ({"uri": "http://x"}, "is for a server"),
        ({"name": "embeded"}, "Did you mean 'embedded'"),
    ],
)
def test_contradicting_settings(changes, message):
    with pytest.raises(UserError, match=message):
        read_config(TrackingConfig(**changes))


@pytest.mark.parametrize(
    "uri",
    [f"http://127.0.0.1:{free_port()}", "http://nowhere.invalid:1"],
    ids=["nothing listens", "no such host"],
)
def test_a_server_that_is_not_there(uri, tmp_path):
    config = TrackingConfig(name="server", uri=uri, folder=str(tmp_path))
    began = time.monotonic()
    with pytest.raises(UserError, match="does not answer: start it"):
        open_store(config)
    assert time.monotonic() - began < 100


def test_a_server_that_never_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = TrackingConfig(name="server", uri=uri, folder=str(tmp_path), timeout_s=1)
        began = time.monotonic()
        with pytest.raises(UserError, match="did not answer within 1 s: look at what keeps it"):
            open_store(config)
        # Two requests of a second each, and the pause between them.
        assert time.monotonic() - began < 100


# Processes.

# One process imports what takes seconds; those that it forks open the store at the same moment.
WRITERS = """
import json, os, signal, sys
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.process import prepare_environment
from layerparity.tracking.opening import open_store

config = TrackingConfig(folder=sys.argv[1])
prepare_environment(config.timeout_s)
import mlflow.store.tracking.sqlalchemy_store

def write(name):
    store = open_store(config)
    for number in range(3):
        with store.start(f"{name}-{number}", "golden", {}, {"number": number}) as run:
            run.log_metrics((f"layer/{m}", float(s), s) for m in range(5) for s in range(62))
            (run.folder / "tensors.bin").write_bytes(b"x")
            if name == "killed" and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

def forked(name):
    child = os.fork()
    if child:
        return child
    try:
        write(name)
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(1)

children = [forked(name) for name in sys.argv[2:]]
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


def test_processes_that_start_at_once_on_a_fresh_store_lose_nothing(tmp_path):
    writers = ("a", "b", "c", "d", "e", "f", "g", "killed")
    # No template is kept yet: one of them makes it.
    told = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(
        [
            *(sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c"),
            *(textwrap.dedent(WRITERS), str(tmp_path / "runs"), *writers),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
        env=told,
    )
    # Nothing else was said: MLflow is to be quiet.
    assert ended.stderr == "", "MLflow is to be quiet"
    # Whoever opened the store after it was killed has said so.
    assert json.loads(ended.stdout.splitlines()[-1]) == [0] * 7 + [-signal.SIGKILL]
    store = open_store(TrackingConfig(folder=str(tmp_path / "runs")))
    assert len(list(tmp_path.glob("cache/layerparity/stores/mlflow-*.db"))) == 1
    runs = {run.name: run for run in store.runs()}
    assert sorted(runs) == sorted(f"{name}-{number}" for name in writers for number in range(3))
    for name, run in runs.items():
        assert run.status == ("INTERRUPTED" if name == "killed-2" else "FINISHED")
        assert raw_run(store, run.id).info.status == run.status.replace("INTERRUPTED", "KILLED")
        assert (run.folder / "tensors.bin").read_bytes() == b"x"
        for metric in range(5):
            assert history(store, run.id, f"layer/{metric}") == {s: float(s) for s in range(62)}


def test_a_cure_names_the_store_unless_it_is_the_usual_one() -> None:
    assert TrackingConfig().words == []
    assert TrackingConfig(folder="mlruns/../mlruns").words == []
    assert TrackingConfig(folder="elsewhere").words == ["tracking.folder=elsewhere"]
    server = TrackingConfig(name="server", uri="http://host:5000")
    assert server.words == ["tracking=server", "tracking.uri=http://host:5000"]
