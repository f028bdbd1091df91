"""What feeds a run: goldens that fit, unions, damage refused, nothing ignored silently."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from safetensors.torch import load_file, save_file

from layerparity.ground.resources import shipped
from layerparity.making.request.goldens import SameWeights
from layerparity.model.checkpoint import Checkpoint
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
TINY = shipped("checkpoints") / "tiny_minimax_m2"
CPU = ("backend=gpu", "device_map=cpu")
JUDGED = (*CPU, "kind=candidate")


def kept(store: Path, name: str) -> Any:
    """Return the stored run of a name."""
    return open_store(TrackingConfig(folder=str(store))).find(name)[0]


def changed_copy(folder: Path, tensor: str) -> Path:
    """Return a copy of the shipped checkpoint in which one number of one tensor differs."""
    copy = Path(shutil.copytree(TINY, folder))
    tensors = load_file(copy / "model.safetensors")
    tensors[tensor].view(-1)[-1] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def golden_copy(store: Path, folder: Path) -> Path:
    return Path(shutil.copytree(kept(store, "the-golden").folder, folder))


def test_the_run_says_which_golden_fed_it(run: Cli, store: Path) -> None:
    assert run(*JUDGED, "scope=single", "layer=2", "name=fed").exit == 0
    assert kept(store, "fed").tags["inputs_from"] == kept(store, "the-golden").id
    assert "inputs_from" not in kept(store, "the-golden").tags


def test_a_golden_of_a_larger_machine_is_refused(run: Cli, monkeypatch) -> None:
    """What it fed would take more memory than is free here: said before a weight is read."""
    monkeypatch.setattr(
        "layerparity.making.needs._free", lambda config: (20_000, "this machine has")
    )
    ended = run(*JUDGED, "scope=single", "layer=2")
    assert ended.exit == 2
    assert "1 x 29 tokens need" in ended.err and "make a golden with seq_len=" in ended.err


def test_a_sweep_feeds_as_the_union_of_its_children(run: Cli, store: Path) -> None:
    made = run("-m", *CPU, "kind=golden", "scope=single", "layer=0,2,3", "name=swept")
    assert made.exit == 0, made.err
    shared = ("inputs=golden", "golden=swept", "name=from-swept")
    ended = run(*JUDGED, "scope=range", "start=2", "end=3", *shared)
    assert ended.exit == 0, ended.err
    assert "golden run swept single 3 and 1 more of its sweep" in ended.out
    parts = {kept(store, f"swept single {layer}").id for layer in (2, 3)}
    assert set(kept(store, "from-swept").tags["inputs_from"].split()) == parts
    judged = run("job=compare", "golden=the-golden", "candidate=from-swept")
    assert judged.exit == 0, judged.out + judged.err
    lacking = run(*JUDGED, "scope=range", "start=3", "end=4", *shared)
    assert lacking.exit == 2
    assert "did not store layers.4:in" in lacking.err


def test_a_sweep_of_other_tokens_is_no_union(run: Cli) -> None:
    swept = ("scope=single", "layer=0", "inputs=prompt", "prompt.text=one,another", "name=mixed")
    assert run("-m", *CPU, "kind=golden", *swept).exit == 0
    ended = run(*JUDGED, "scope=single", "layer=0", "inputs=golden", "golden=mixed")
    assert ended.exit == 2, ended.out
    assert "were fed different inputs (" in ended.err


def test_a_golden_of_other_weights_is_passed_over(run: Cli, store: Path, tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    copy = changed_copy(tmp_path / "copy", name)
    other = ("model=checkpoint", f"model.path={copy}")
    assert run(*CPU, *other, "name=other-weights", "capture=components").exit == 0
    ended = run(*JUDGED, "scope=single", "layer=3", "name=right-one")
    assert ended.exit == 0, ended.err
    assert f"other-weights is passed over: it was made from other weights: {name}" in ended.out
    assert kept(store, "right-one").tags["inputs_from"] != kept(store, "other-weights").id
    # Block 2 is the same in both, so the newer golden feeds it.
    assert run(*JUDGED, "scope=single", "layer=2", "name=newer").exit == 0
    assert kept(store, "newer").tags["inputs_from"] == kept(store, "other-weights").id
    named = run(*JUDGED, "scope=single", "layer=3", "golden=other-weights")
    assert named.exit == 0, named.err
    assert f"note: golden run other-weights was made from other weights: {name}" in named.out


def test_a_large_model_is_compared_in_part(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TINY)
    names = [name for name in checkpoint.tensors if ".layers.1." in name]
    used = {"layers.1": checkpoint.read(names)[1]}
    sizes = {name: checkpoint.tensors[name].bytes for name in names}
    budget = sum(sizes.values()) // 3
    part = SameWeights(checkpoint, ["layers.1"], budget)
    assert part.differing(used) == ""
    assert 0 < sum(sizes[name] for name in part._digests) <= budget
    assert SameWeights(checkpoint, ["layers.1"], 1).differing({"layers.1": {names[0]: "x"}})
    assert "holds no y" in part.differing({"layers.1": {"y": "x"}})
    wrong = {"layers.1": dict.fromkeys(names, "x")}
    assert SameWeights(checkpoint, ["layers.1"]).differing(wrong) in names
    # Another stage's weights say nothing about this one.
    assert part.differing({**used, "layers.2": {"y": "x"}}) == ""


def test_altered_tensors_of_a_golden_are_refused(run: Cli, store: Path, tmp_path: Path) -> None:
    folder = golden_copy(store, tmp_path / "carried")
    shared = ("scope=single", "layer=2", "inputs=golden", f"golden={folder}")
    assert run(*JUDGED, *shared).exit == 0
    path = folder / "tensors/layers.2.safetensors"
    tensors = load_file(path)
    tensors["layers.2:in"][0, 0, 0] += 1
    save_file(tensors, path)
    ended = run(*JUDGED, *shared, "name=altered")
    assert ended.exit == 2, ended.out
    assert f"{path} is damaged (layers.2:in: its bytes are not those" in ended.err
    assert kept(store, "altered").status == "FAILED"


def test_altered_tokens_of_a_golden_are_refused(run: Cli, store: Path, tmp_path: Path) -> None:
    folder = golden_copy(store, tmp_path / "carried")
    path = folder / "inputs.safetensors"
    inputs = load_file(path)
    save_file(inputs | {"attention_mask": torch.zeros_like(inputs["attention_mask"])}, path)
    shared = ("scope=single", "layer=2", "inputs=golden", f"golden={folder}")
    ended = run(*JUDGED, *shared)
    assert ended.exit == 2, ended.out
    assert f"{path} is damaged (attention_mask: its bytes are not those" in ended.err
    save_file({"position_ids": inputs["position_ids"]}, path)
    assert "holds no tensor" in run(*JUDGED, *shared).err


@pytest.mark.parametrize("file", ["../../outside.safetensors", "/etc/outside.safetensors"])
def test_a_golden_that_names_files_outside_is_refused(
    run: Cli, store: Path, tmp_path: Path, file: str
) -> None:
    folder = golden_copy(store, tmp_path / "carried")
    made = json.loads((folder / "manifest.json").read_text())
    for record in made["records"]:
        record["file"] = file
    (folder / "manifest.json").write_text(json.dumps(made))
    ended = run(*JUDGED, "scope=single", "layer=2", "inputs=golden", f"golden={folder}")
    assert ended.exit == 2, ended.out
    assert f"names a file outside its folder ({file}): make the run again." in ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["kind=candidate", "prompt.chat=true"],
            "prompt.chat would do nothing: the run is fed the",
        ),
        (["inputs=golden", "prompt.text=hello"], "or use inputs=prompt."),
        (["inputs=random", "prompt.file=x"], "prompt.file would do nothing: the run is fed random"),
        (["inputs=prompt", "golden=the-golden"], "golden would do nothing: the run is fed prompt"),
        (["candidate=latest"], "candidate= belongs to job=compare"),
        (["max_memory=40GB", "device_map=auto"], "max_memory=cpu:40GB"),
        (["inputs=random", "inputs.batch=0"], "inputs.batch=0: give 1 or more."),
        (["inputs=random", "inputs.batch=-2"], "inputs.batch=-2: give 1 or more."),
        (["inputs=random", "inputs.scale=nan"], "inputs.scale=nan"),
        (["inputs=random", "inputs.seed=-1"], "inputs.seed=-1"),
    ],
)
def test_what_would_do_nothing_is_refused(run: Cli, arguments: list[str], says: str) -> None:
    if "device_map=auto" in arguments and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    ended = run("backend=gpu", "device_map=cpu", "scope=single", "layer=0", *arguments)
    assert ended.exit == 2, ended.out
    assert says in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_the_neuron_backend_refuses_a_device_map(cli: Cli) -> None:
    pytest.importorskip("torch_xla")
    ended = cli("backend=neuron", "device_map=cpu", "scope=single", "layer=0")
    assert ended.exit == 2, ended.out
    assert "device_map does nothing on backend=neuron: leave it out." in ended.err


def test_xla_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerparity.backends.neuron import xla

    monkeypatch.setattr(xla, "_is_running", lambda: True)
    monkeypatch.setattr(xla, "_started", {})
    monkeypatch.setattr(xla, "_given", {})
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    runtime = xla.XlaRuntime(is_neuron=False, tp_degree=1, excess_precision=False)
    # What XLA read when it started counts, not what the environment says by now.
    xla._started.update(runtime._environment())
    monkeypatch.delenv("PJRT_DEVICE")
    for _ in range(2):
        runtime.prepare()
        assert os.environ["PJRT_DEVICE"] == "CPU"
        assert os.environ["XLA_FLAGS"] != "--mine"
        runtime.restore()
        assert "PJRT_DEVICE" not in os.environ
        assert os.environ["XLA_FLAGS"] == "--mine"


def test_what_an_experiment_sets_is_not_held_against_it(run: Cli, tmp_path: Path) -> None:
    own = tmp_path / "experiments"
    own.mkdir()
    (own / "chatty.yaml").write_text("# @package _global_\n# Chat?\nprompt: {chat: true}\n")
    ended = run("experiment=chatty", *JUDGED, "scope=single", "layer=2")
    assert ended.exit == 0, ended.err


LISTING_PORT = """
from pathlib import Path
from layerparity.ports.known.hf import HfPort


class Port(HfPort):
    def __init__(self, assets):
        super().__init__(assets)
        sites = assets.recorded["layers.1"].items()
        Path("recorded").write_text("\\n".join(f"{site} {' '.join(s.axes)}" for site, s in sites))
"""


def test_a_port_is_told_what_its_golden_recorded_beyond_any_table(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "listing_port.py").write_text(LISTING_PORT)
    model = make_model("gemma2", tmp_path / "models")
    words = (*CPU, "model=checkpoint", f"model.path={model}", "capture=components")
    assert cli(*words, "inputs=random", "reference.make=false").exit == 0
    asked = ("kind=candidate", "port._target_=listing_port.Port", "scope=single", "layer=1")
    ended = cli(*words, *asked)
    assert ended.exit == 0, ended.err
    recorded = (tmp_path / "recorded").read_text().splitlines()
    assert {"mlp.act_fn:out batch token channel", ":in batch token channel"} <= {*recorded}
