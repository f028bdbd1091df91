"""What a server's refusal, a store that is gone and a wrong clock are called, and what helps."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
from stores import fresh_config, fresh_store

from layerparity.ground.errors import UserError
from layerparity.ground.files import disk_cure, writing
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

TEN_YEARS = 10 * 365 * 24 * 3600


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """Serve one answer to every request; yield the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "found", "cure"),
    [
        (500, b"<html>", "failed over a request (HTTP 500)", "look into its log"),
        (500, b'{"error_code": "INTERNAL_ERROR"}', "failed over a request (HTTP 500)", "log"),
        (429, b"", "takes no more requests for now (HTTP 429)", "wait"),
        (502, b"", "behind a proxy that cannot reach it (HTTP 502)", "wait until it is ready"),
        (503, b"", "is not ready, or has too much to do (HTTP 503)", "wait until it is ready"),
        (401, b"", "refuses us (HTTP 401)", "MLFLOW_TRACKING_USERNAME"),
        (403, b'{"error_code": "PERMISSION_DENIED", "message": "no"}', "refuses us", "USERNAME"),
        (403, b"Permission denied", "does not allow us this (HTTP 403)", "ask who runs it"),
        (
            401,
            b'{"error_code": "UNAUTHENTICATED", "message": "Failed to list artifacts in s3://x"}',
            "cannot use its store of artifacts (UNAUTHENTICATED: Failed to list",
            "AWS_ACCESS_KEY_ID",
        ),
        (
            400,
            b'{"error_code": "BAD_REQUEST", "message": "(psycopg.errors.UndefinedColumn)"}',
            "has a database of another version of MLflow",
            "stop all servers that use it, copy it, and run 'mlflow db upgrade'",
        ),
        (200, b'{"status": "ok"}', "does not answer like an MLflow server", "tracking.uri"),
        (404, b"<html>", "not answer like an MLflow server (HTTP 404)", "correct tracking.uri"),
        (200, b"<html>401 503", "does not answer like an MLflow server", "correct tracking.uri"),
        (
            404,
            b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "No Run with id=x"}',
            "no longer knows what this command uses (RESOURCE_DOES_NOT_EXIST: No Run",
            "run the command again",
        ),
    ],
)
def test_a_status_of_http_is_named_with_what_helps(
    status: int, body: bytes, found: str, cure: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    # It asks for an hour's patience; nobody would know what the command waits for.
    with answering(status, body, Retry_After="3600") as uri, pytest.raises(UserError) as said:
        config = TrackingConfig("server", uri, str(tmp_path), timeout_s=5)
        if "RESOURCE" in found:
            open_store_without_experiment(config)
        open_store(config)
    assert found in said.value.found and cure in said.value.cure
    assert "does not answer:" not in str(said.value)
    assert time.monotonic() - began < 300


def open_store_without_experiment(config: TrackingConfig) -> None:
    """Ask for a run, as a command does whose server was emptied meanwhile."""
    from mlflow import MlflowClient

    from layerparity.tracking.failures import user_errors

    with user_errors(config):
        MlflowClient(config.address).get_run("x")


def test_what_is_no_server_of_http_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            # Closed, accept() ends with an error.
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match="does not answer like an MLflow server: correct"):
            open_store(TrackingConfig("server", address, str(tmp_path)))
        listening.shutdown(socket.SHUT_RDWR)
    with answering(200, b"{}") as uri, pytest.raises(UserError, match="does not speak https"):
        secure = uri.replace("http://", "https://")
        open_store(TrackingConfig("server", secure, str(tmp_path)))


def test_a_server_of_another_version_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, b"2.9.1") as uri:
        for _ in range(2):
            with pytest.raises(UserError, match="does not answer like"):
                open_store(TrackingConfig("server", uri, str(tmp_path)))
    with answering(200, version("mlflow").encode()) as uri, pytest.raises(UserError):
        open_store(TrackingConfig("server", uri, str(tmp_path)))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"note: the tracking server is MLflow 2.9.1, and here is {version('mlflow')}"
    )


@pytest.mark.parametrize("what", ["folder", "database", "replaced"])
def test_a_store_that_is_gone_is_no_matter_of_permissions(what: str, tmp_path: Path) -> None:
    """Without a look at the file sqlite writes on into one that has no name any more."""
    store = fresh_store(tmp_path / "runs")
    other = fresh_config(tmp_path / "other").root
    root = store.config.root
    with pytest.raises(UserError) as said, store.start("lost", "golden", {}, {}) as run:
        if what == "folder":
            shutil.rmtree(root)
        else:
            for file in root.glob("mlflow.db*"):
                file.unlink()
        if what == "replaced":
            shutil.copy(other / database.FILE_NAME, root)
        run.log_metrics([("layer/x", 1.0, 0)])
    how = "replaced by another" if what == "replaced" else "removed, moved or unmounted"
    path = root if what == "folder" else root / database.FILE_NAME
    assert said.value.found == f"{path} was {how} while this command ran"
    assert "bring it back" in said.value.cure and "permission" not in str(said.value)


def test_a_store_that_goes_in_the_end_is_missed_too(tmp_path: Path) -> None:
    store = fresh_store(tmp_path / "runs")
    with (
        pytest.raises(UserError, match="was removed, moved or unmounted"),
        store.start("lost", "golden", {}, {}),
    ):
        store.config.root.rename(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (OSError(28, "No space left on device"), "free some disk space"),
        (OSError(27, "File too large"), "free some disk space"),
        (OSError(30, "Read-only file system"), "mount the disk for writing"),
        (PermissionError(13, "Permission denied"), "change its permissions"),
        (FileNotFoundError(2, "No such file"), "check that its folder is still there"),
        (OSError(5, "Input/output error"), "check the disk"),
    ],
)
def test_what_helps_follows_from_what_the_system_said(error: OSError, cure: str) -> None:
    assert disk_cure(error) == cure
    with pytest.raises(UserError) as said, writing(Path("x")):
        raise error
    assert said.value.cure == f"{cure}."


# Which run is the latest.


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Set the clock of the process, as MLflow reads it, forwards or back."""
    with monkeypatch.context() as patch:
        for module in ("mlflow.tracking._tracking_service.client", "mlflow.utils.time"):
            patch.setattr(
                f"{module}.get_current_time_millis", lambda: int((time.time() + seconds) * 1000)
            )
        yield


def made(store: Store, name: str, kind: str = "golden", parent: str | None = None) -> str:
    with store.start(name, kind, {"fingerprint": "f"}, {}, parent=parent) as run:
        pass
    return run.id


def test_a_clock_ten_years_ahead_makes_no_run_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fresh_store(tmp_path)
    with clock(monkeypatch, TEN_YEARS):
        ahead = made(store, "same")
        swept = made(store, "sweep", "sweep")
        made(store, "part", "candidate", swept)
    assert store.get(ahead).start_time.year >= time.gmtime().tm_year + 9
    behind = made(store, "same")
    with clock(monkeypatch, -TEN_YEARS):
        last = made(store, "other", "candidate")
    assert [run.id for run in store.find("latest", "golden")] == [behind]
    assert [run.id for run in store.find("latest", "candidate")] == [last]
    assert [run.id for run in store.find("same")] == [behind]
    assert store.newest("golden").id == behind
    assert store.by_fingerprint("f").id == last
    assert [run.id for run in store.runs()][:2] == [last, behind]
    assert [run.id for run in sorted(store.runs(), key=lambda run: run.order)][-1] == last


def test_runs_without_a_count_come_after_those_with_one(tmp_path: Path) -> None:
    store = fresh_store(tmp_path)
    client, experiment = store._connection.client, store._connection.experiment_id
    future = int((time.time() + TEN_YEARS) * 1000)
    tags = {"layerparity.kind": "golden"}
    old = [client.create_run(experiment, start_time=at, tags=tags) for at in (future, 1)]
    bad = client.create_run(experiment, tags={**tags, "layerparity.sequence": "many"})
    for run in (*old, bad):
        client.set_terminated(run.info.run_id)
    assert store.get(bad.info.run_id).sequence == 0
    client.delete_run(bad.info.run_id)
    assert store.newest("golden").id == old[0].info.run_id
    new = made(store, "new")
    assert store.newest("golden").id == new and store.get(new).sequence == 1
    assert [run.id for run in store.runs()] == [new, *(each.info.run_id for each in old)]
