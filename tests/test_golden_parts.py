"""A golden by parts (layer_chunks): each goes on from the one before, as one run would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from conftest import ROOT, Ended
from mlflow import MlflowClient

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.making import endings, sweep, sweep_part
from layerparity.record.references import CHAINED, ISOLATED, StoredReferences
from layerparity.record.stored_run import StoredRun
from layerparity.settings.config import Config, RunKind
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

Cli = Callable[..., Ended]
PARTS = ("backend=gpu", "device_map=cpu", "scope=range", "layer_chunks=3", "kind=golden")
ONE = ("backend=gpu", "device_map=cpu", "kind=golden")
TEXT = "prompt.texts=[one two three four five,six seven]"


@pytest.fixture
def here(cli: Cli, store: Path) -> Cli:
    """A command over a store that has a golden of the shipped model in parts, and as one."""
    own = ("model=tiny_minimax_m2", f"tracking.folder={store}", "capture=components")

    def command(*words: str) -> Ended:
        return cli(*words, *own)

    if not (store / "mlflow.db").exists():
        made = command("-m", *PARTS, TEXT, "name=parts")
        assert made.exit == 0, made.err
        assert command(*ONE, TEXT, "name=one").exit == 0
    return command


def opened(store: Path) -> Store:
    return open_store(TrackingConfig(folder=str(store)))


def parts_of(store: Path, name: str = "parts") -> list[StoredRun]:
    return sorted(opened(store).find(name), key=lambda run: run.order)


def test_all_parts_are_one_run_to_the_bit(here: Cli, store: Path) -> None:
    (one,), parts = opened(store).find("one"), parts_of(store)
    assert len(parts) == 3
    whole = one.read_manifest()
    records = {each.site: each for run in parts for each in run.read_manifest().records}
    assert {each.site for each in whole.records} == records.keys()
    assert {each.site: each.digest for each in whole.records} == {
        site: each.digest for site, each in records.items()
    }
    stages = [stage for run in parts for stage in run.read_manifest().stages]
    assert stages == whole.stages


@pytest.mark.parametrize("feed", [ISOLATED, CHAINED])
def test_floors_go_on_as_well(here: Cli, store: Path, feed: str) -> None:
    (one,), parts = opened(store).find("one"), parts_of(store)
    believed = StoredReferences(one.files, one.read_manifest().reference)
    compared = 0
    for run in parts:
        stored = StoredReferences(run.files, run.read_manifest().reference)
        for entry in stored.entries():
            own = believed.find(entry.stage, entry.feed, entry.site)
            if entry.feed != feed:
                continue
            assert own is not None, (entry.stage, str(entry.site))
            assert stored.reference(entry).equal(believed.reference(own)), str(entry.site)
            for dtype in entry.floors:
                ours, theirs = stored.floor(entry, dtype), believed.floor(own, dtype)
                assert ours is not None and theirs is not None
                assert ours.tokens.equal(theirs.tokens), (str(entry.site), dtype)
            compared += 1
    assert compared > 80


def test_a_chained_candidate_is_judged_by_the_parts(here: Cli, cli: Cli, store: Path) -> None:
    made = here("backend=gpu", "device_map=cpu", "kind=candidate", TEXT, "name=right")
    assert made.exit == 0, made.err
    words = ("job=compare", "golden=parts", f"tracking.folder={store}")
    right = cli(*words, "candidate=right")
    assert right.exit == 0, right.out
    assert "whole model: pass" in right.out
    fault = ("port=fault", "port.name=qk_norm_per_head", "port.layers=[3]")
    made = here("backend=gpu", "device_map=cpu", "kind=candidate", TEXT, *fault, "name=wrong")
    assert made.exit == 0, made.err
    wrong = cli(*words, "candidate=wrong")
    assert wrong.exit == 1
    assert "FAIL at layers.3.self_attn.q_norm:out" in wrong.out


def test_a_part_without_the_one_before_says_which(here: Cli, store: Path) -> None:
    other = "prompt.text=other words than before"
    refused = here(*PARTS, "chunk=1", other)
    assert refused.exit == 2
    assert "layers.2 goes on from layers.1 of a golden of this prompt" in refused.err
    assert "make chunk=0 first" in refused.err
    # By hand, one after the other; other settings are no part of this chain.
    assert here(*PARTS, "chunk=0", other).exit == 0
    assert here(*PARTS, "chunk=1", other, "attn_implementation=eager").exit == 2
    assert here(*PARTS, "chunk=1", other, "dtype=bfloat16").exit == 2
    assert here(*PARTS, "chunk=1", other).exit == 0
    floors = here(*PARTS, "chunk=2", other, "reference.dtypes=[float16]")
    assert (floors.exit, "floors of other types" in floors.err) == (2, True), floors.err


def test_a_range_of_its_own_is_fed_by_a_golden(here: Cli, store: Path) -> None:
    ranged = ("start=2", "end=5", "layer_chunks=2")
    words = [word for word in PARTS if not word.startswith("layer_chunks")]
    made = here("-m", *words, *ranged, "name=ranged")
    assert made.exit == 0, made.err
    feeds = {run.read_manifest().feed for run in parts_of(store, "ranged")}
    assert feeds == {"isolated"}
    # So is a part alone, where a golden has what it is fed and no part before it is there.
    alone = here(*PARTS, "chunk=2", "golden=one", "name=alone")
    assert alone.exit == 0, alone.err


def test_a_lost_part_costs_itself_alone(here: Cli, store: Path) -> None:
    ids = [list(range(3, 40)), list(range(50, 70))]
    Path("ids.json").write_text(json.dumps(ids))
    words = ("-m", *PARTS, "inputs=tokens", "inputs.file=ids.json", "name=again")
    assert here(*words).exit == 0
    middle = parts_of(store, "again")[1]
    MlflowClient(f"sqlite:///{store}/mlflow.db").delete_run(middle.id)
    again = here(*words, "reuse=true")
    assert again.exit == 0, again.err
    assert again.out.count("reused") == 2


def test_some_tokens_of_a_golden_by_parts(here: Cli, cli: Cli, store: Path) -> None:
    Path("ids.json").write_text(json.dumps([list(range(3, 100))]))
    tokens = ("inputs=tokens", "inputs.file=ids.json")
    made = here("-m", *PARTS, *tokens, "capture.tokens=24", "name=some")
    assert made.exit == 0, made.err
    kept = {run.read_manifest().kept.columns for run in parts_of(store, "some")}
    assert [len(each) for each in kept] == [24]
    end = parts_of(store, "some")[0].read_manifest().record(Site.parse("layers.1:out"))
    assert end is not None and end.shape[1] == 97
    assert here("backend=gpu", "device_map=cpu", "kind=candidate", *tokens, "name=all").exit == 0
    ended = cli("job=compare", "golden=some", "candidate=all", f"tracking.folder={store}")
    assert ended.exit == 0, ended.out
    assert "24 of 97 tokens were stored and judged" in ended.out


def test_parts_in_other_processes_wait_for_the_one_before(here: Cli, store: Path) -> None:
    text = "prompt.text=side by side they wait"
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=3")
    made = here("-m", *PARTS, *launcher, text, "name=beside")
    assert made.exit == 0, made.err + made.out
    assert here(*ONE, text, "name=beside-one").exit == 0
    (one,) = opened(store).find("beside-one")
    (last,) = (run for run in parts_of(store, "beside") if run.tags["scope"] == "range 4..5")
    logits = Site.parse("lm_head:out")
    digests = {run.read_manifest().record(logits).digest for run in (one, last)}
    assert len(digests) == 1


def test_none_begins_where_the_one_before_did_not_succeed(tmp_path: Path) -> None:
    words = ("-m", *PARTS, "hydra/launcher=joblib", "hydra.launcher.n_jobs=3", "seq_len=100000")
    own = ("model=tiny_minimax_m2", f"tracking.folder={tmp_path}")
    command = [sys.executable, str(ROOT / "run.py"), *words, *own]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert refused.returncode == 2, refused.stderr
    for number in (1, 2):
        said = f"chunk={number} goes on from chunk={number - 1}, which did not succeed"
        assert said in refused.stdout + refused.stderr
    assert "has 100000 tokens and the model's context is 512" in refused.stdout


def test_a_part_that_was_killed_is_not_waited_for(
    here: Cli, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, words = opened(store), "scope=range +chunk=0"
    parent = runs.begin("swept", "sweep", {}, {})
    child = runs.begin("first", "golden", {"part": words}, {}, parent=parent.id)
    tracking = TrackingConfig(folder=str(store))
    config = Config(kind=RunKind.golden, layer_chunks=3, chunk=1, tracking=tracking)
    monkeypatch.setenv(endings.VARIABLE, str(tmp_path))
    monkeypatch.setenv(sweep.PARENT_VARIABLE, parent.id)
    monkeypatch.setattr(sweep_part, "part", lambda: "scope=range +chunk=1")
    monkeypatch.setattr(sweep_part, "_ALIVE", 0.6)
    waiting = Thread(target=sweep_part.await_part_before, args=(config,), daemon=True)
    waiting.start()
    waiting.join(2)
    assert waiting.is_alive()
    child.end("KILLED", None)
    parent.end("FAILED", None)
    waiting.join(20)
    assert not waiting.is_alive()
    with pytest.raises(UserError, match="chunk=1 goes on from chunk=0, which did not succeed"):
        sweep_part.await_part_before(config)
