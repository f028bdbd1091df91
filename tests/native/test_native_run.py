"""The native runtime through the door, on torch's CPU device in place of Neuron's.

Everything here runs with torch 2.13 and without torch_xla, golden and comparison included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.store import open_store

Cli = Callable[..., Ended]
SCOPE = ("scope=range", "start=0", "end=1", "capture=components")
NATIVE = ("backend=neuron", "backend.runtime=native_cpu", *SCOPE)
LIMIT = 5e-6


@pytest.fixture
def door(cli: Cli, store: Path) -> Cli:
    """The command line over a store with a golden run of two blocks."""
    if not (store / "mlflow.db").exists():
        golden = ("backend=gpu", "device_map=cpu", *SCOPE, "name=golden", "inputs=prompt")
        ended = cli(f"tracking.folder={store}", *golden)
        assert ended.exit == 0, ended.err
    return lambda *words: cli(f"tracking.folder={store}", *words)


def kept(store: Path, name: str) -> StoredRun:
    return open_store(TrackingConfig(folder=str(store))).find(name)[0]


def judged(door: Cli, store: Path, name: str) -> Verdict:
    door("job=compare", "golden=golden", f"candidate={name}", f"name=judged-{name}")
    return Verdict.read(next(kept(store, f"judged-{name}").folder.rglob("verdict.json")))


MODES = {
    "eager": ((), "eager"),
    "compiled": (("backend.compile=export",), "torch.compile aot_eager"),
}


@pytest.mark.parametrize("name", MODES)
def test_a_candidate_passes_without_torch_xla(door: Cli, store: Path, name: str) -> None:
    words, compiled_by = MODES[name]
    ended = door(*NATIVE, *words, f"name={name}")
    assert ended.exit == 0, ended.err
    verdict = judged(door, store, name)
    assert verdict.outcome is Outcome.PASS, verdict.where
    errors = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
    assert len(errors) > 30
    assert max(errors) < LIMIT
    run = kept(store, name)
    assert run.read_manifest().device == "torch's CPU device, not Neuron"
    assert run.read_manifest().numerics["compile"] == compiled_by
    # Two blocks of a shape are one graph; the golden's input to the first is fed, not embedded.
    assert run.tags["fact.compiles"] == ("0" if name == "eager" else "1")
    assert run.tags["version.torch"].startswith("2.13")
    assert "version.torch_xla" not in run.tags
    assert "torch_xla" not in sys.modules


def test_split_over_two_ranks_by_transformers_own_plan(door: Cli, store: Path) -> None:
    ended = door(*NATIVE, "tp_degree=2", "name=split")
    assert ended.exit == 0, ended.err
    verdict = judged(door, store, "split")
    assert verdict.outcome is Outcome.PASS, verdict.where
    manifest = kept(store, "split").read_manifest()
    assert manifest.device == "torch's CPU device, not Neuron, 2 ranks"
    assert manifest.ranks.degree == 2
    assert manifest.ranks.disagreements == {}
    assert kept(store, "split").tags["fact.collectives"] == "gloo"


def test_a_planted_fault_is_named(door: Cli, store: Path) -> None:
    planted = ("port=fault", "port.name=qkv_never_loaded", "port.layers=[1]")
    ended = door(*NATIVE, *planted, "name=wrong")
    assert ended.exit == 0, ended.err
    verdict = judged(door, store, "wrong")
    assert verdict.outcome is Outcome.FAIL
    assert verdict.guilty is not None
    assert str(verdict.guilty.place).startswith("layers.1.self_attn")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("backend.runtime=xla_cpu",),
            "torch_xla is not installed: for the stand-in, use backend.",
        ),
        (("backend.runtime=native",), "torch_neuronx is missing or PyPI's placeholder"),
        (
            ("backend.compile=trace",),
            "the native runtime keeps its own: use backend.compile=export",
        ),
        (("backend.compile=export", "tp_degree=2"), "compile=export runs unsharded"),
        (("backend.excess_precision=true", "tp_degree=2"), "is for the XLA runtime: leave it out"),
        (("port=clean", "port.name=tp 2", "tp_degree=2"), "tp_degree=2"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_line(
    door: Cli, words: tuple[str, ...], said: str
) -> None:
    ended = door(*NATIVE, *words)
    assert ended.exit == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
