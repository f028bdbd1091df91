"""layer_chunks: a sweep over ranges of blocks, each a part."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
SWEEP = ("-m", "backend=gpu", "device_map=cpu", "kind=candidate", "scope=range")


def test_chunks_of_another_scope_are_refused(cli: Cli) -> None:
    ended = cli("backend=gpu", "scope=full", "layer_chunks=2")
    assert ended.exit == 2 and "layer_chunks=2 does not belong to scope=full" in ended.err


def test_a_sweep_takes_every_chunk_and_is_compared_as_one(
    cli: Cli, golden_here: Callable[..., None], tmp_path: Path
) -> None:
    golden_here()
    ended = cli(*SWEEP, "layer_chunks=4")
    assert ended.exit == 0, ended.err
    store = open_store(TrackingConfig(folder=str(tmp_path / "mlruns")))
    (sweep,) = store.runs("sweep")
    scopes = [run.tags["scope"] for run in store.children(sweep.id)]
    assert scopes == ["range 0..0", "range 1..2", "range 3..3", "range 4..5"]
    compared = cli("job=compare", f"candidate={sweep.id}")
    assert compared.exit == 0, compared.err
    assert "42 pass = 42 sites asked for" in compared.out
    # A chunk is kept as the range that it is: what runs one again types that.
    kept = [run.files.read_config() for run in store.children(sweep.id)]
    assert [(each["start"], each["end"]) for each in kept] == [(0, 0), (1, 2), (3, 3), (4, 5)]
    assert {(each["layer_chunks"], each["chunk"]) for each in kept} == {(None, None)}
    own = ("device_map=cpu", "job.own_inputs=true")
    judged = cli("job=compare", *own, f"candidate={store.children(sweep.id)[1].id}")
    assert judged.exit == 0, judged.err


def test_what_follows_a_wrong_chunk_can_be_typed(
    cli: Cli, golden_here: Callable[..., None]
) -> None:
    golden_here()
    fault = ("port=fault", "port.name=router_bias_dropped", "port.layers=[3]")
    assert cli(*SWEEP, "layer_chunks=3", *fault).exit == 0
    ended = cli("job=compare", "candidate=latest")
    assert ended.exit == 1, ended.err
    run = next(line for line in ended.out.splitlines() if "scope=single layer=3" in line)
    assert "chunk" not in run
    assert cli(*shlex.split(run.partition("run.py ")[2])).exit == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scope=range", "layer_chunks=0"), "This sweep has no parts"),
        (("scope=single", "layer=range(0,0)"), "This sweep has no parts"),
        (("scope=single", "layer=0", "tracking.folder=a,b"), "are kept in one store"),
        (("scope=range", "layer_chunks=2,3"), "layer_chunks=2,3 cuts the blocks in several ways"),
    ],
)
def test_a_sweep_of_nothing_is_refused(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    ended = cli("-m", "backend=gpu", "device_map=cpu", *words)
    assert ended.exit == 2, ended.out
    assert said in ended.err
    assert not (tmp_path / "mlruns").exists()


def test_jobs_that_make_no_runs_may_go_over_several_stores(cli: Cli) -> None:
    ended = cli("-m", "job=runs", "tracking.folder=a,b")
    assert ended.exit == 0, ended.err
    assert ended.out.count("no store") == 2, ended.out


def test_one_chunk_may_be_asked_for(cli: Cli, tmp_path: Path) -> None:
    ended = cli(*SWEEP, "layer_chunks=3", "chunk=0,2", "inputs=random", "dry_run=true")
    assert ended.exit == 0, ended.err
    assert ended.out.count("│ candidate") == 2
