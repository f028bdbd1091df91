"""The native runtime through the door, on torch's CPU device in place of Neuron's.

Everything here runs with torch 2.13 and without torch_xla, golden and comparison included.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, Ended

from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

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


TELLS = ("generate.max_new_tokens=4",)
WHOLE = ("backend=neuron", "backend.runtime=native_cpu", "scope=full")


@pytest.fixture
def told(door: Cli, store: Path) -> Cli:
    """The same door, with a golden of the whole model that has decoded."""
    if not (store / "told").exists():
        ended = door("backend=gpu", "device_map=cpu", "scope=full", *TELLS, "name=told")
        assert ended.exit == 0, ended.err
        (store / "told").touch()
    return door


@pytest.mark.parametrize("name", MODES)
def test_decoding_with_a_cache_passes(told: Cli, store: Path, name: str) -> None:
    """A step of decoding is a graph of its own for each kind of stage, and no more than that."""
    words, _ = MODES[name]
    ended = told(*WHOLE, *words, *TELLS, "golden=told", f"name=decoded-{name}")
    assert ended.exit == 0, ended.err
    told("job=compare", "golden=told", f"candidate=decoded-{name}", f"name=judged-{name}-decoded")
    folder = kept(store, f"judged-{name}-decoded").folder
    verdict = Verdict.read(next(folder.rglob("verdict.json")))
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert verdict.whole.outcome is Outcome.PASS
    steps = {row.site.pass_step for row in verdict.rows if row.site.layer == 5}
    assert steps == {("prefill", 0), ("decode", 1), ("decode", 2), ("decode", 3)}
    compiles = int(kept(store, f"decoded-{name}").tags["fact.compiles"])
    # The embedding, the blocks, the norm and the head; of the blocks and the head two shapes.
    assert compiles == 0 if name == "eager" else 4 <= compiles <= 8


def test_generation_agrees_with_the_golden_and_with_its_own_prefill(told: Cli, store: Path) -> None:
    """What experiment=generate_parity does, on torch's CPU device and without torch_xla."""
    free = (*WHOLE, "inputs=prompt", "feed=chained", *TELLS, "name=freely")
    once = (*WHOLE, "inputs=tokens", "inputs.run=freely", "feed=chained", "name=at-once")
    for words in (free, once):
        ended = told(*words)
        assert ended.exit == 0, ended.err
    ended = told("job=generation", "golden=told", "candidate=freely", "job.prefill=at-once")
    assert ended.exit == 0, ended.out + ended.err


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
    # As Neuron's runtime and its collectives expect it, whoever started this process.
    assert kept(store, "split").tags["fact.rendezvous"] == "env://127.0.0.1, as torchrun tells"


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
        (
            ("port=nxdi", "port.model=a.B"),
            "runs NxD's CPU mode on the CPU: use backend.runtime=xla_cpu",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_line(
    door: Cli, words: tuple[str, ...], said: str
) -> None:
    ended = door(*NATIVE, *words)
    assert ended.exit == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1


MAIN = ROOT / ".venv" / "bin" / "python"


@pytest.mark.skipif(not MAIN.is_file(), reason="make test makes .venv, whose torch is another one")
def test_a_golden_of_another_torch_judges_this_one(cli: Cli, tmp_path: Path) -> None:
    """One store, two environments: the golden is made by the torch that torch_xla loads with."""
    folder = f"tracking.folder={tmp_path / 'shared'}"
    words = ("backend=gpu", "device_map=cpu", SMALL, *SCOPE, "inputs=prompt", "name=golden", folder)
    ended = subprocess.run(
        [MAIN, ROOT / "run.py", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert cli(folder, *NATIVE, "golden=golden", "name=native").exit == 0
    compared = cli(folder, "job=compare", "golden=golden", "candidate=native", "name=judged")
    # Two blocks of six were asked for, and all of them pass.
    assert compared.exit == 0, compared.out + compared.err
    shared = tmp_path / "shared"
    versions = [kept(shared, name).tags["version.torch"] for name in ("golden", "native")]
    old, new = (each.partition("+")[0] for each in versions)
    assert (old, new) == ("2.9.1", "2.13.0")
    assert f"versions:  torch {old} against {new}\n" in compared.out
    verdict = Verdict.read(next(kept(shared, "judged").folder.rglob("verdict.json")))
    assert verdict.outcome is Outcome.PASS, verdict.where


def test_the_doctor_holds_this_environment_against_the_native_runtimes(cli: Cli) -> None:
    ended = cli("job=doctor", "backend=neuron", "backend.runtime=native_cpu")
    assert "2.9.1" not in ended.out
    assert "2.13.0" in ended.out
    assert ended.exit == 0, ended.out + ended.err
