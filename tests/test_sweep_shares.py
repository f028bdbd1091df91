"""The parts of a sweep in one process share what is the same of all of them, and nothing else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from layerparity.ground.resources import shipped
from layerparity.making import sweep
from layerparity.model import header, idle_skeletons, layer_classes, resolve
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.skeleton import Skeleton
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import opening
from layerparity.tracking.opening import open_store

SWEEP = ("backend=gpu", "device_map=cpu", "kind=candidate", "scope=single", "inputs=random")
FOLDER = shipped("checkpoints") / "tiny_minimax_m2"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Let a test begin as a fresh process does."""
    monkeypatch.setattr(idle_skeletons, "_idle", {})
    monkeypatch.setattr(resolve, "_last", [])
    layer_classes._classes.cache_clear()
    header._listed.cache_clear()


@pytest.fixture
def counts(monkeypatch):
    """Count what is built for runs, and whose names are mapped; a proof's small model apart."""
    found: Counter[str] = Counter()

    class Counted(Skeleton):
        def __init__(self, *args):
            super().__init__(*args)
            found["built"] += 1

            def targets(names, plain=self.conversion.targets):
                found["mapped"] += 1
                return plain(names)

            self.conversion.targets = targets

    monkeypatch.setattr(idle_skeletons, "Skeleton", Counted)
    return found


def outputs(folder) -> list[str]:
    """Return the hash of every tensor of a sweep's parts, by layer."""
    store = open_store(TrackingConfig(folder=str(folder)))
    (parent,) = store.runs(kind="sweep")
    manifests = [run.read_manifest() for run in store.children(parent.id)]
    return [f"{each.site} {each.digest}" for one in manifests for each in one.records]


def test_parts_build_and_map_the_model_once(cli, tmp_path, counts, monkeypatch):
    assert cli("-m", *SWEEP, "layer=0,1,2,3").exit == 0
    assert counts == {"built": 1, "mapped": 1}
    assert layer_classes._classes.cache_info().misses == 1
    assert header._listed.cache_info().misses == len(list(FOLDER.glob("*.safetensors")))
    shared = outputs(tmp_path / "mlruns")
    monkeypatch.setattr(idle_skeletons, "give_back", lambda skeleton: None)
    monkeypatch.setattr(idle_skeletons, "_idle", {})
    assert cli("-m", *SWEEP, "layer=0,1,2,3", "tracking.folder=apart").exit == 0
    assert counts == {"built": 5, "mapped": 5}
    assert outputs(tmp_path / "apart") == shared


@pytest.fixture
def opened(monkeypatch):
    """Return the folder of each store that is opened."""
    folders: list[str] = []
    original = opening._open_embedded

    def open_embedded(config):
        folders.append(config.root.name)
        return original(config)

    monkeypatch.setattr(opening, "_open_embedded", open_embedded)
    return folders


def test_parts_use_the_store_that_the_sweep_is_kept_in(cli, opened):
    assert cli("-m", *SWEEP, "layer=0,1", "tracking.folder=first").exit == 0
    assert opened == ["first"]


def test_a_server_and_another_store_are_opened_for_every_part(monkeypatch):
    served = TrackingConfig(name="server", uri="http://127.0.0.1:1")
    asked = []
    monkeypatch.setattr(opening, "open_store", asked.append)
    kept = SimpleNamespace(config=served)
    monkeypatch.setattr(sweep, "_open", [(kept, None, [])])
    sweep.open_store(served)
    kept.config = TrackingConfig(folder="first")
    second = TrackingConfig(folder="second")
    sweep.open_store(second)
    assert asked == [served, second]
    assert sweep.open_store(kept.config) is kept


def skeleton(attention: str = "eager") -> tuple[Checkpoint, Skeleton]:
    checkpoint = Checkpoint(FOLDER)
    return checkpoint, idle_skeletons.take(checkpoint.config, torch.float32, attention, None, ())


def test_a_skeleton_comes_back_empty(tmp_path):
    checkpoint, one = skeleton()
    one.load(checkpoint, "layers.0")
    idle_skeletons.give_back(one)
    assert all(tensor.is_meta for tensor in one.model.state_dict().values())
    again, other = skeleton()
    assert other is one
    assert skeleton()[1] is not one, "it is one run's at a time"
    assert other.load(again, "layers.1").keys() == set(again.of_stage("layers.1"))


def test_other_settings_get_a_skeleton_of_their_own():
    _, one = skeleton()
    idle_skeletons.give_back(one)
    assert skeleton("sdpa")[1] is not one


@pytest.mark.parametrize("change", ["number", "hook", "class"])
def test_a_skeleton_that_a_run_changed_is_not_handed_on(change):
    _, one = skeleton()
    block = one.module("layers.0")
    if change == "number":
        block.mlp.top_k = 1
        block.self_attn.scaling *= 2
    elif change == "hook":
        block.register_forward_hook(lambda *_: None)
    else:
        block.input_layernorm.__class__ = type("Other", (type(block.input_layernorm),), {})
    idle_skeletons.give_back(one)
    assert skeleton()[1] is not one
