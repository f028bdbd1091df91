"""Refusals that need config.json alone come before torch; a run says what it loads and how long."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, Ended

from layerparity.anatomy.site import Site
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.making import terminal
from layerparity.making.prepare import with_kind
from layerparity.making.request import goldens
from layerparity.making.request.inputs import Request
from layerparity.ports.opening import open_backend, open_port
from layerparity.settings.config import Config, PromptSettings, RunKind

# Several commands in one process, each as a user would type it.
HF = {"_target_": "layerparity.ports.known.hf.HfPort"}
PROBE = """
import contextlib, io, json, sys
sys.path.insert(0, {src!r})
from hydra.core.global_hydra import GlobalHydra
from layerparity.cli.door import main
for command in {commands!r}:
    sys.argv = ["run.py", *command]
    GlobalHydra.instance().clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = int(main())
    heavy = {{"torch", "transformers", "torch_xla", "mlflow"}} & set(sys.modules)
    print(json.dumps([code, sorted(heavy), out.getvalue(), err.getvalue()]))
"""
REFUSED = [
    (["scope=single", "layer=99"], "layer=99 is out of range: deep_minimax_m2 has layers 0 to 61"),
    (["scope=range", "start=0", "end=62"], "end=62 is out of range"),
    (["layer=2"], "layer=2 does not belong to scope=full: use scope=single."),
    (["scope=range", "start=3", "end=1"], "end=1 comes before start=3: swap them."),
    (["scope=single"], "scope=single wants layer=N, 0 to 61."),
    (["scope=single", "layer=0", "component=atention"], "Did you mean 'attention'?"),
    (["model.path=/nowhere"], "No checkpoint folder at /nowhere"),
    (["port=fault", "kind=golden"], "add kind=candidate"),
    (["port=fault"], "port=fault wants port.name=NAME, one of: "),
    (
        ["backend=neuron", "port=fault", "port.name=qk_norm_skiped"],
        "Did you mean 'qk_norm_skipped'?",
    ),
    (
        ["kind=candidate", "port=fault", "port.name=qk_norm_skipped", "port.layers=[62]"],
        "port.layers=[62]: give some of the layers 0 to 61",
    ),
    (["job=compare", "what=weights", "scope=single", "layer=62"], "layer=62 is out of range"),
]
# The store is opened for these: mlflow is loaded, torch is not.
UNKNOWN = [
    ["backend=neuron", "golden=nowhere"],
    ["inputs=golden", "inputs.run=nowhere"],
    ["backend=gpu", "scope=single", "layer=3", "golden=nowhere"],
    ["job=compare", "golden=nowhere"],
    ["job=compare", "candidate=nowhere"],
    ["job=compare", "golden=nowhere", "candidate=nowhere"],
]


def probe(folder: Path, commands: list[list[str]]) -> list[tuple[int, list[str], str, str]]:
    """Run commands in one fresh process: exit, heavy modules so far, output and errors of each."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROBE).format(commands=commands, src=f"{ROOT}/src")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [tuple(json.loads(line)) for line in ended.stdout.splitlines()]


def test_what_config_json_refuses_imports_nothing_heavy(tmp_path: Path) -> None:
    for (words, says), ended in zip(
        REFUSED, probe(tmp_path, [words for words, _ in REFUSED]), strict=True
    ):
        code, heavy, out, err = ended
        assert (code, heavy, out) == (2, [], ""), (words, out, err)
        assert says in err, words
        assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_run_is_refused_before_torch(tmp_path: Path) -> None:
    for words, ended in zip(UNKNOWN, probe(tmp_path, UNKNOWN), strict=True):
        code, heavy, out, err = ended
        assert (code, heavy) == (2, ["mlflow"]), (words, out, err)
        assert "There are no runs in " in err, words


def test_a_golden_that_would_not_be_used_is_not_looked_for() -> None:
    def asked(inputs: str, kind: RunKind, stage: str = "embed_tokens") -> str | None:
        config = Config(golden="nowhere", kind=kind)
        config.inputs = registry.load("making.inputs", inputs).Settings()
        return goldens.asked_for(config, (stage,))

    assert asked("auto", RunKind.candidate) == "nowhere"
    assert asked("auto", RunKind.golden) is None
    # A golden run of a later block cannot begin with tokens: it is fed by another one.
    assert asked("auto", RunKind.golden, "layers.3") == "nowhere"
    assert asked("golden", RunKind.golden) == "nowhere"
    assert asked("prompt", RunKind.candidate) is None


PROMPTS = (PromptSettings(), PromptSettings(text=""), PromptSettings(texts=["a", "b"]))


@pytest.mark.parametrize("kind", RunKind)
@pytest.mark.parametrize("stage", ["embed_tokens", "layers.0", "layers.0.mlp", "layers.3", "norm"])
@pytest.mark.parametrize("asked", PROMPTS, ids=["default", "empty", "batch"])
def test_what_is_refused_early_is_what_is_looked_for_later(
    kind: RunKind, stage: str, asked: PromptSettings
) -> None:
    config = Config(golden="nowhere", kind=kind, prompt=asked)
    config.inputs = registry.load("making.inputs", "auto").Settings()
    looked_for: list[str | None] = []
    request = Request(
        config=config,
        # Without a tokenizer: what comes after the golden is refused.
        model_folder=Path(),
        model={},
        stages=(stage,),
        sites_of=lambda stage, measured: [Site(stage, "in")],
        golden=lambda name: looked_for.append(name) or (),
    )
    with pytest.raises(UserError):
        registry.load("making.inputs", "auto").prepare(config.inputs, request)
    early = goldens.asked_for(config, (stage,))
    assert looked_for == ([] if early is None else [early])


def test_a_port_of_the_users_own_is_not_imported_early() -> None:
    config = Config()
    config.backend = registry.load("backends.known", "gpu").Settings()
    config.port = {"_target_": "no_such_module.Port"}
    open_port.check(config, 6)
    config.port = {**HF, "nme": 1}
    with pytest.raises(UserError, match="takes"):
        open_port.check(config, 6)


@pytest.mark.parametrize("name", registry.names("backends.known"))
def test_a_backend_file_tells_the_kind_it_makes(name: str) -> None:
    config = Config()
    config.backend = registry.load("backends.known", name).Settings()
    config.port = HF
    made = open_backend.abilities(config).kind
    assert made is (RunKind.golden if name == "gpu" else RunKind.candidate)
    assert with_kind(config).kind is made
    assert config.kind is RunKind.auto, "what was typed stays"


def test_what_takes_seconds_is_named_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.backend = registry.load("backends.known", "neuron").Settings()
    config.port = HF
    there = dict.fromkeys(("mlflow", "torch"))
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(modules=there))
    terminal.say_loading(config)
    assert capsys.readouterr().out == "loading torch_xla, transformers ...\n"
    there.update(dict.fromkeys(("torch_xla", "transformers")))
    terminal.say_loading(config)
    assert capsys.readouterr().out == ""


def test_the_time_tells_what_the_start_took() -> None:
    assert terminal.with_start_up(1.84, 26.7) == "1.8 s (27 s with start-up)"
    assert terminal.with_start_up(1.84, 2.5) == "1.8 s"


def test_a_run_says_both(cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_runs", itertools.count())
    words = ("device_map=cpu", "scope=single", "layer=0", "reference.make=false")
    ended = cli(*words)
    assert ended.exit == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if " sites in " in line]
    # This process, which runs the tests, began more than a second ago.
    assert "s with start-up)" in line


def test_only_the_first_run_of_a_process_counts_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_runs", itertools.count())
    now = time.perf_counter()
    assert terminal.began() < now - 0.1
    assert terminal.began() > now
