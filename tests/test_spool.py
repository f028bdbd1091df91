"""The spool: what a real server that went away, or a process that was killed, leaves there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
from stores import free_port, fresh_config

from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import artifacts, server
from layerparity.tracking.opening import open_store

# A run for a server that says when it is at a moment, and goes on when it is told to.
PROGRAM = """
import sys
from layerparity.ground.errors import UserError
from layerparity.ground.files import write_text
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import artifacts
from layerparity.tracking.opening import open_store

uri, folder, moment = sys.argv[1:]
upload = artifacts.upload

def stand(here):
    if here == moment:
        print(run.id, flush=True)
        sys.stdin.readline()

def uploading(*arguments):
    upload(*arguments)
    stand("uploaded")

artifacts.upload = uploading
store = open_store(TrackingConfig("server", uri, folder, "remote", 30))
try:
    with store.start("far", "golden", {}, {}) as run:
        write_text(run.folder / "tensors" / "0.bin", "0123")
        stand("half")
        run.set_tags({"further": 1})
        write_text(run.folder / "manifest.json", "{}")
        stand("whole")
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Site:
    """A server that can be stopped and started again, and a folder with the spool of its runs."""

    def __init__(self, base):
        self.config, self.port = fresh_config(base / "server"), free_port()
        self.folder, self.up = base / "here", ExitStack()
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self):
        assert self.up.enter_context(server.serve(self.config, self.port)) == self.address

    def stop(self):
        self.up.close()

    def open(self, **changes):
        settings = {"uri": self.address, "folder": str(self.folder), "timeout_s": 30, **changes}
        return open_store(TrackingConfig("server", experiment="remote", **settings))

    def program(self, moment):
        """Start the program; return it and the id of its run when it stands at its moment."""
        command = [sys.executable, "-c", PROGRAM, self.address, str(self.folder), moment]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        child = subprocess.Popen(command, text=True, **pipes)
        run_id = child.stdout.readline().strip()
        assert run_id, child.stderr.read()
        return child, run_id

    def spooled(self):
        return sorted(path.name for path in (self.folder / "spool").glob("[!.]*"))

    def cut_off(self, moment):
        """Make a run whose server goes away at a moment; return its id and what was said."""
        child, run_id = self.program(moment)
        self.stop()
        _, said = child.communicate("go on\n", timeout=120)
        assert child.returncode == 2, said
        return run_id, said.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.stop()


@pytest.fixture
def up(site):
    """The site, its server running and nothing spooled."""
    if not server.answers(site.address):
        site.start()
    yield site
    left = site.spooled()
    # A test that fails must not make the next ones fail.
    for each in left:
        shutil.rmtree(site.folder / "spool" / each)
    assert left == [], "a test left something"


def whole_on_server(store, run_id):
    found = store.get(run_id)
    assert found.status == "FINISHED"
    assert "error" not in found.tags and "interrupted" not in found.tags
    assert found.tags["manifest"] == text_digest("{}")
    assert found.file("tensors/0.bin").read_text() == "0123"
    assert found.files.is_run
    assert not found.file(".server").exists(), "hidden files stay here"


@pytest.mark.parametrize("moment", ["whole", "uploaded"])
def test_a_whole_run_whose_server_went_away_is_finished_by_the_next_command(up, moment, capsys):
    run_id, said = up.cut_off(moment)
    folder = up.folder / "spool" / run_id
    assert "does not answer" in said and str(folder) in said and "job=sync" in said
    assert "next command" in said
    assert (folder / "tensors" / "0.bin").read_text() == "0123"
    up.start()
    capsys.readouterr()
    store = up.open()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"note: run far ({run_id[:8]}) waited: it is uploaded now"
    whole_on_server(store, run_id)


def test_job_sync_uploads_it_and_says_what_waits_elsewhere(up, cli):
    run_id, _ = up.cut_off("whole")
    here = (f"tracking.folder={up.folder}", "tracking.experiment=remote", "tracking.timeout_s=30")
    there = ("job=sync", "tracking=server", f"tracking.uri={up.address}", *here)
    refused = cli("job=sync", *here)
    assert refused.exit == 2 and "add tracking=server tracking.uri=" in refused.err
    assert f"job=sync tracking=server tracking.uri={up.address}" in refused.out
    assert cli(*there).exit == 2, "the server is away"
    up.start()
    ended = cli(*there)
    assert ended.exit == 0, ended.err
    assert f"run far ({run_id[:8]}) waited: it is uploaded now" in ended.out
    assert f"Nothing waits for {up.address}." in ended.out
    whole_on_server(up.open(), run_id)
    assert "waited" not in cli(*there).out


def test_half_a_run_whose_server_went_away_is_removed(up):
    run_id, said = up.cut_off("half")
    assert "does not answer" in said and "job=sync" not in said
    assert up.spooled() == [run_id]
    up.start()
    store = up.open()
    assert up.spooled() == []
    assert store.get(run_id).status == "INTERRUPTED"


@pytest.mark.parametrize(
    ("moment", "status"), [("half", "KILLED"), ("whole", "FINISHED"), ("uploaded", "FINISHED")]
)
def test_of_a_killed_process_the_whole_is_finished_and_the_half_removed(up, moment, status):
    child, run_id = up.program(moment)
    store = up.open()
    assert up.spooled() == [run_id] and store.get(run_id).status == "RUNNING", "it is alive"
    child.kill()
    child.communicate()
    store = up.open()
    assert store._connection.client.get_run(run_id).info.status == status
    assert up.spooled() == []
    if status == "FINISHED":
        whole_on_server(store, run_id)
    else:
        assert store.get(run_id).tags["interrupted"] == "true"


# A process that stands, in turn, where a folder is made, removed and fetched.
CUT = """
import os, shutil, signal, sys
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import artifacts, spool
from layerparity.tracking.opening import open_store

def cut(*arguments, **keys):
    os.kill(os.getpid(), signal.SIGKILL)

uri, folder, moment = sys.argv[1:]
store = open_store(TrackingConfig("server", uri, folder, "remote", 30))
if moment == "made":
    spool.write_text = cut
run = store.begin("cut", "golden", {}, {})
if moment == "removed":
    shutil.rmtree = cut
run.log_text("{}", "manifest.json")
run.publish()
run.end()
artifacts.transfer = cut
store.get(run.id).file("manifest.json")
"""


@pytest.mark.parametrize("moment", ["made", "removed", "fetched"])
def test_a_folder_that_is_made_removed_or_fetched_leaves_nothing_for_ever(up, moment):
    command = [sys.executable, "-c", CUT, up.address, str(up.folder), moment]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    assert len(list(up.folder.rglob("layerparity-*"))) == 1
    store = up.open()
    (found,) = [run for run in store.runs(limit=1) if run.name == "cut"]
    assert found.status == ("INTERRUPTED" if moment == "made" else "FINISHED")
    if moment == "fetched":
        assert found.file("manifest.json").read_text() == "{}"
    assert list(up.folder.rglob("layerparity-*")) == []


def test_another_servers_run_is_neither_uploaded_nor_removed(up, capsys):
    child, run_id = up.program("whole")
    child.kill()
    child.communicate()
    note = up.folder / "spool" / run_id / ".server"
    note.write_text("http://elsewhere:1")
    up.open()
    assert up.spooled() == [run_id]
    note.write_text(up.address)
    whole_on_server(up.open(), run_id)


def test_an_upload_that_fails_costs_no_command_and_is_tried_again(up, monkeypatch, capsys):
    child, run_id = up.program("whole")
    child.kill()
    child.communicate()

    def refuse(*arguments):
        raise UserError("no room there")

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "upload", refuse)
        store = up.open()
        assert store.get(run_id).status == "INTERRUPTED"
        said = capsys.readouterr().out
        assert "was not uploaded, it waits in" in said and "no room there" in said
    whole_on_server(up.open(), run_id)


def test_a_run_that_fails_for_another_reason_leaves_nothing(up):
    with (
        pytest.raises(ValueError),
        up.open().start("bad", "golden", {}, {}) as run,
    ):
        raise ValueError
    assert not run.folder.exists()
