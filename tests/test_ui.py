"""The UI job: it answers, shows runs and ends with its children; and remote stores."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from stores import free_port, fresh_config

from layerparity.ground.errors import Exit, UserError
from layerparity.jobs import ui
from layerparity.record.folder import USED_WEIGHTS
from layerparity.settings.tracking import UI_FILE, TrackingConfig
from layerparity.tracking import server
from layerparity.tracking.opening import open_store


def job(tracking, **settings):
    return ui.run(SimpleNamespace(tracking=tracking, job=ui.Settings(**settings)))


def get(url):
    with urllib.request.urlopen(url, timeout=200) as reply:
        return reply.read()


def group_members(group):
    """Return the pids of a process group that still run."""
    listed = subprocess.check_output(["ps", "-eo", "pgid=,stat=,pid="], text=True)
    rows = (line.split() for line in listed.splitlines())
    return [pid for pgid, stat, pid in rows if pgid == str(group) and "Z" not in stat]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An embedded store with one run, and the address of its UI."""
    config = fresh_config(tmp_path_factory.mktemp("ui"))
    with open_store(config).start("shown", "golden", {"backend": "gpu"}, {}) as run:
        run.log_metrics([("layer/x", 1.0, 0), ("layer/x", 2.0, 1)])
        run.log_text("<h1>report</h1>", "report.html")
    with server.serve(config, free_port()) as address:
        yield address, run


def test_the_ui_serves_the_run_and_its_report_in_place(served):
    address, run = served
    assert b"<html" in get(address)
    shown = json.loads(get(f"{address}/api/2.0/mlflow/runs/get?run_id={run.id}"))["run"]
    assert shown["info"]["run_name"] == "shown" and shown["info"]["status"] == "FINISHED"
    report = get(f"{address}/get-artifact?path=report.html&run_uuid={run.id}")
    assert report == b"<h1>report</h1>"


def test_a_taken_port_is_named_with_the_cure(served, tmp_path):
    port = int(served[0].rsplit(":", 1)[1])
    with pytest.raises(UserError, match=rf"Port {port} .*is in use.*job\.port={port + 1}"):
        job(TrackingConfig(folder=str(tmp_path / "none")), port=port)
    assert not (tmp_path / "none").exists(), "nothing is made before the port is known to be free"


def test_a_port_that_another_ui_takes_meanwhile_is_not_said_to_be_ours(
    served, tmp_path, monkeypatch
):
    """Two begin at once and both find the port free; what answers there is the other's store."""
    address, _ = served
    port, check = int(address.rpartition(":")[2]), server.check_port
    monkeypatch.setattr(
        server, "check_port", lambda *_: monkeypatch.setattr(server, "check_port", check)
    )
    with (
        pytest.raises(UserError, match=f"Port {port} on 127.0.0.1 is in use: choose another"),
        server.running(fresh_config(tmp_path), port, "127.0.0.1"),
    ):
        pass
    assert not (tmp_path / UI_FILE).exists(), "links must not lead to another store"


@pytest.mark.parametrize("port", [-1, 0, 70000])
def test_a_port_that_does_not_exist(port):
    with pytest.raises(UserError, match=rf"There is no port {port}.*job\.port=5001"):
        job(TrackingConfig(), port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org", "192.168.0.7", "::"])
def test_only_loopback_is_served(host):
    with pytest.raises(UserError, match=r"ssh -L 5000:127\.0\.0\.1:5000"):
        job(TrackingConfig(), host=host)


def test_of_a_server_the_page_of_its_runs_is_printed(served, capsys):
    assert job(TrackingConfig(name="server", uri=f"{served[0]}/")) is Exit.OK
    assert f"{served[0]}/#/experiments/1/runs?viewStateShareKey=layerparity" in (
        capsys.readouterr().out
    )


def test_a_server_that_is_gone_is_said():
    with pytest.raises(UserError, match="does not answer"):
        job(TrackingConfig(name="server", uri=f"http://127.0.0.1:{free_port()}"))


def test_a_store_that_the_ui_cannot_open_says_why(tmp_path, monkeypatch):
    config = fresh_config(tmp_path)
    monkeypatch.setattr(server, "_launch", _failing)
    with (
        pytest.raises(UserError, match="did not start: the last words"),
        server.serve(config, free_port()),
    ):
        pass


def _failing(config, host, port, log):
    command = [sys.executable, "-c", "print('first'); print('the last words')"]
    return subprocess.Popen(command, stdout=log, start_new_session=True)


def test_a_ui_that_starts_slowly_is_not_explained_by_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "START_SECONDS", 0)
    with pytest.raises(UserError, match="did not answer within 0 s: it may still be starting"):
        job(fresh_config(tmp_path), port=free_port())


def test_last_words_are_none_that_every_start_has(tmp_path):
    advice = "[MLflow] Security middleware enabled. To allow others, use --host 0.0.0.0 and x."
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        log.write(f"OSError: no more of it\n{advice}\nINFO:     Waiting for startup.\n")
        assert server.Server("", None, log).last_words() == "OSError: no more of it"


PROGRAM = (
    "import sys; from types import SimpleNamespace; from layerparity.jobs import ui;"
    "from layerparity.settings.tracking import TrackingConfig;"
    "ui.run(SimpleNamespace(tracking=TrackingConfig(folder=sys.argv[1]),"
    "job=ui.Settings(port=int(sys.argv[2]))))"
)


@pytest.mark.fresh_interpreter
def test_sigterm_ends_the_ui_with_all_its_processes(tmp_path):
    config, port = fresh_config(tmp_path), free_port()
    command = [sys.executable, "-c", PROGRAM, config.folder, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert f"http://127.0.0.1:{port}" in process.stdout.readline().decode()
        listing = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
        (group,) = subprocess.check_output(listing, text=True).split()
        assert group_members(group)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 128 + signal.SIGTERM
    assert group_members(group) == []
    server.check_port("127.0.0.1", port)


@pytest.mark.fresh_interpreter
def test_a_killed_ui_takes_its_server_with_it(tmp_path):
    config, port = fresh_config(tmp_path), free_port()
    command = [sys.executable, "-c", PROGRAM, config.folder, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert f"http://127.0.0.1:{port}" in process.stdout.readline().decode()
        listing = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
        (group,) = subprocess.check_output(listing, text=True).split()
        process.kill()
    deadline = time.monotonic() + 200
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert group_members(group) == []
    server.check_port("127.0.0.1", port)


# A remote store: the same server, spoken to over HTTP, in an experiment that was made through it.


@pytest.fixture
def remote(served, tmp_path):
    config = TrackingConfig("server", served[0], str(tmp_path / "local"), "remote", timeout_s=30)
    return open_store(config)


def test_a_remote_run_is_uploaded_and_fetched_again(remote):
    with remote.start("far", "golden", {"backend": "gpu"}, {"a": 1}) as run:
        (run.folder / "tensors").mkdir()
        (run.folder / "tensors" / "0.bin").write_bytes(b"0123")
        (run.folder / "tensors" / ".1.bin.part").write_bytes(b"half")
        run.log_metrics([("layer/x", 1.0, 0)])
        assert run.folder.is_relative_to(remote.config.root / "spool")
    assert not run.folder.exists(), "what was uploaded stays in the spool"
    (found,) = remote.find("far")
    assert found.status == "FINISHED" and found.tags["backend"] == "gpu"
    assert found.file("tensors/0.bin").read_bytes() == b"0123"
    assert not (remote.config.root / "cache" / "runs").exists(), "more was fetched than asked for"
    files = [path for path in found.folder.rglob("*") if path.is_file()]
    names = sorted(path.relative_to(found.folder).as_posix() for path in files)
    assert names == ["log.txt", "tensors/0.bin"]
    inode = found.folder.stat().st_ino
    assert remote.get(run.id).folder.stat().st_ino == inode, "it was fetched twice"


def test_what_a_remote_run_does_not_hold_is_absent_and_the_server_is_not_blamed(remote):
    with remote.start("sparse", "golden", {}, {}) as run:
        run.log_text('{"norm": {"norm.w": "1"}}', USED_WEIGHTS)
    files = remote.get(run.id).files
    assert files.read_used_weights() == {"norm": {"norm.w": "1"}}
    assert (files.read_config(), files.read_profile(), files.read_mask()) == ({}, None, None)
    assert not files.is_run
    with pytest.raises(UserError, match="the run did not finish"):
        files.read_manifest()


def test_a_servers_runs_are_counted_too(remote, monkeypatch):
    read = "mlflow.tracking._tracking_service.client.get_current_time_millis"
    with monkeypatch.context() as patch:
        patch.setattr(read, lambda: int((time.time() + 10 * 365 * 86400) * 1000))
        with remote.start("ahead", "candidate", {}, {}):
            pass
    with remote.start("right", "candidate", {}, {}) as run:
        pass
    assert [each.id for each in remote.find("latest", "candidate")] == [run.id]


def test_half_a_run_leaves_no_files_behind(remote):
    with pytest.raises(ValueError, match="halfway"), remote.start("half", "golden", {}, {}) as run:
        (run.folder / "0.bin").write_bytes(b"0123")
        raise ValueError("halfway")
    assert not run.folder.exists()
    assert remote.get(run.id).status == "FAILED"


def test_a_server_that_goes_away_costs_seconds_and_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with ExitStack() as serving:
        there = fresh_config(tmp_path / "there")
        address = serving.enter_context(server.serve(there, free_port()))
        folder = str(tmp_path / "local")
        store = open_store(TrackingConfig("server", address, folder, "remote", timeout_s=2))
        with (
            pytest.raises(UserError, match="does not answer"),
            store.start("cut off", "golden", {}, {}) as run,
        ):
            (run.folder / "0.bin").write_bytes(b"0123")
            serving.close()
            began = time.monotonic()
            run.log_metrics([("layer/x", 1.0, 0)])
    assert time.monotonic() - began < 100
    assert (run.folder / "0.bin").read_bytes() == b"0123"


def test_an_address_that_is_no_mlflow_server(tmp_path):
    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, env=environment
    )
    try:
        port = int(process.stdout.readline().split(b" port ")[1].split()[0])
        config = TrackingConfig("server", f"http://127.0.0.1:{port}", str(tmp_path))
        with pytest.raises(UserError, match="does not answer like an MLflow server"):
            open_store(config)
    finally:
        process.kill()
        process.communicate()


def test_an_ipv6_port_can_be_checked():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with pytest.raises(UserError, match="There is no port"):
        server.check_port("::1", 0)


def test_a_store_that_is_not_there_is_not_served(tmp_path):
    with pytest.raises(UserError, match=r"There are no runs in .*nowhere, which is not there"):
        job(TrackingConfig(folder=str(tmp_path / "nowhere")), port=free_port())
    assert not (tmp_path / "nowhere").exists()
