"""A team's store: PostgreSQL and S3 behind a real MLflow server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Ended
from runs import make_run, sites
from safetensors.torch import save_file
from stores import fresh_store
from team import BUCKET, SECRETS, Team, listens, missing

from layerparity.ground.errors import UserError
from layerparity.ground.files import read_tensor
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import ranges
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
FILE, SITES = "tensors/layers.0.safetensors", ("layers.0:in", "layers.0.mlp:out", "layers.0:out")


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team()
    try:
        team.start()
        yield team
    finally:
        team.close()


@pytest.fixture
def store(team: Team, tmp_path: Path) -> Store:
    return open_store(TrackingConfig("server", team.address, str(tmp_path / "here"), timeout_s=30))


def tensors(numbers: int) -> dict[str, torch.Tensor]:
    return {site: torch.full((numbers,), float(at)) for at, site in enumerate(SITES)}


def kept(store: Store, numbers: int) -> str:
    with store.start("far", "golden", {}, {"backend": "gpu"}) as run:
        path = run.folder / FILE
        path.parent.mkdir()
        save_file(tensors(numbers), path)
        run.log_text("{}", "manifest.json")
    return run.id


def cached(store: Store, run_id: str) -> int:
    """Return the bytes of a run that were fetched."""
    found = store.config.root.glob(f"cache/*/{run_id}/**/*")
    return sum(path.stat().st_size for path in found if path.is_file())


def test_of_a_large_file_the_bytes_of_one_tensor_are_fetched(team: Team, store: Store) -> None:
    numbers = ranges.SMALL_FILE // 4
    run_id = kept(store, numbers)
    found = store.get(run_id)
    assert found is not None and found.status == "FINISHED"
    path = found.files.locate_tensor(FILE, SITES[1])
    assert torch.equal(read_tensor(path, SITES[1]), tensors(numbers)[SITES[1]])
    assert ranges.SMALL_FILE <= cached(store, run_id) < ranges.SMALL_FILE + 4096
    with pytest.raises(UserError, match=r"holds no tensor 'layers\.9:out'"):
        found.files.locate_tensor(FILE, "layers.9:out")
    with pytest.raises(UserError, match="outside its folder"):
        found.files.locate_tensor("../../else", SITES[0])


def test_a_small_file_and_one_whose_store_is_out_of_reach_come_whole(
    team: Team, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = kept(store, 4), kept(store, ranges.SMALL_FILE // 4)
    # As where only the server can reach the S3 store.
    monkeypatch.setattr(
        ranges._SignedFile, "url", property(lambda self: "http://127.0.0.1:9/"), raising=False
    )
    monkeypatch.setattr(
        ranges._SignedFile,
        "__init__",
        lambda self, url, headers, size: vars(self).update(headers=headers, size=size),
    )
    for run_id, numbers in ((small, 4), (large, ranges.SMALL_FILE // 4)):
        found = store.get(run_id)
        assert found is not None
        path = found.files.locate_tensor(FILE, SITES[2])
        assert path == store.config.root / "cache" / "files" / run_id / FILE
        assert torch.equal(read_tensor(path, SITES[2]), tensors(numbers)[SITES[2]])


def test_credentials_are_in_no_tag_file_or_table(team: Team, store: Store) -> None:
    import psycopg

    run_id = kept(store, ranges.SMALL_FILE // 4)
    found = store.get(run_id)
    assert found is not None
    found.files.locate_tensor(FILE, SITES[0])
    held = [path.read_bytes() for path in store.config.root.rglob("*") if path.is_file()]
    listed = team.s3().list_objects_v2(Bucket=BUCKET)["Contents"]
    held += [team.s3().get_object(Bucket=BUCKET, Key=o["Key"])["Body"].read() for o in listed]
    with psycopg.connect(team.database) as link:
        tables = ("tags", "params", "experiment_tags", "runs", "experiments")
        held += [str(link.execute(f"SELECT * FROM {name}").fetchall()).encode() for name in tables]
    assert any(run_id.encode() in each for each in held)
    for secret in (*SECRETS.values(), "X-Amz-Signature"):
        assert not any(secret.encode() in each for each in held)


def test_a_server_that_is_killed_in_a_run_leaves_nothing_that_looks_whole(
    team: Team, tmp_path: Path
) -> None:
    config = TrackingConfig("server", team.address, str(tmp_path / "here"), timeout_s=5)
    store = open_store(config)
    with (
        pytest.raises(UserError, match="does not answer"),
        store.start("cut", "golden", {"fingerprint": "f"}, {}) as run,
    ):
        team.kill("mlflow")
        run.set_tags({"further": 1})
    team.start_mlflow()
    store = open_store(config)
    found = store.get(run.id)
    assert found is not None and not found.finished and not found.file("manifest.json").exists()
    assert store.by_fingerprint("f") is None
    assert store.get(kept(store, 4)) is not None


def test_a_folder_of_runs_is_merged_into_the_teams(
    team: Team, tmp_path: Path, cli: Callable[..., Ended]
) -> None:
    here = fresh_store(tmp_path / "home")
    fed = ""
    for kind in ("golden", "candidate"):
        tags = {"model": "tiny", "dtype": "float32", **({"inputs_from": fed} if fed else {})}
        with here.start(f"merged-{kind}", kind, tags, {}) as run:
            make_run(run.folder, sites(), kind=kind)
        fed = run.id
    place = ("tracking=server", f"tracking.uri={team.address}", "tracking.experiment=merged")
    place += ("tracking.timeout_s=30",)
    assert cli("job=export", "run=all", "tracking.folder=home").exit == 0
    for word in ("imported", "is here already"):
        taken = cli("job=import", "run=all.zip", *place)
        assert taken.exit == 0 and taken.out.count(word) == 2, taken.err
    compared = cli("job=compare", *place)
    assert compared.exit in (0, 4), compared.err
    listed = cli("job=runs", *place)
    assert "3 runs" in listed.out and "merged-golden" in listed.out


def said(ended: Ended) -> str:
    """Return the one line with which a command that the user can mend ended."""
    assert ended.exit == 2 and "Traceback" not in ended.err, ended.err
    (line,) = ended.err.splitlines()
    return line


def test_what_stands_behind_the_server_is_named_where_it_fails(
    team: Team, store: Store, tmp_path: Path, cli: Callable[..., Ended]
) -> None:
    run_id = kept(store, 4)
    place = ("tracking=server", f"tracking.uri={team.address}", f"tracking.folder={tmp_path / 'x'}")
    export = ("job=export", f"run={run_id}", "to=x.zip", *place)
    team.kill("s3")
    files = "its store of artifacts may not answer, or refuse the credentials"
    assert f"failed over a request (HTTP 500): look into its log, which says why: {files}" in said(
        cli(*export)
    )
    ends = r"(failed|broke off) over a request( \(HTTP \d+\))?; .* whole and waits"
    with pytest.raises(UserError, match=ends):
        kept(store, 4)
    # What comes after the first requests needs credentials that are known there.
    team.start_s3(INITIAL_NO_AUTH_ACTION_COUNT="1")
    refused = said(cli(*export))
    assert "cannot use its store of artifacts" in refused and "AWS_SECRET_ACCESS_KEY" in refused
    team.kill("s3")
    team.start_s3()
    kept(store, 4)


def test_a_database_that_refuses_the_server_is_named(
    team: Team, tmp_path: Path, cli: Callable[..., Ended]
) -> None:
    import psycopg

    place = ("tracking=server", f"tracking.uri={team.address}", f"tracking.folder={tmp_path / 'x'}")
    with psycopg.connect(team.database, autocommit=True) as link:
        link.execute("ALTER ROLE lp PASSWORD 'another'")
        ours = "pid <> pg_backend_pid() AND datname = 'mlflow'"
        link.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")
        line = said(cli("job=runs", *place, "tracking.timeout_s=2"))
        link.execute(f"ALTER ROLE lp PASSWORD '{SECRETS['postgres']}'")
    assert "its database may not answer, or refuse its login" in line
    assert SECRETS["postgres"] not in line


def test_the_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = """
import sys
from team import Team
team = Team()
team.start()
print(*team.ports.values(), team.folder, flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", program], text=True, env=environment, **pipes)
    *ports, folder = child.stdout.readline().split()
    assert len(ports) == 3
    child.kill()
    child.communicate()
    deadline = time.monotonic() + 60
    for port in ports:
        while listens(int(port)):
            assert time.monotonic() < deadline, port
            time.sleep(0.2)
    shutil.rmtree(Team().folder)
    assert not Path(folder).exists()
