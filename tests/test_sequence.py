"""job=sequence: what stands beside the steps reaches each, and a wrong step is named at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ended

from layerparity.ground.errors import Exit
from layerparity.jobs import compare
from layerparity.jobs import run as run_job
from layerparity.machine import neuron

Cli = Callable[..., Ended]
HEAD = "# @package _global_\n# Mine?\ndefaults:\n  - override /job: sequence\n"


@pytest.fixture
def steps_of(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs an experiment of these texts, its jobs replaced by a list."""
    seen: list[Any] = []

    def job(config: Any) -> Exit:
        seen.append(config)
        return Exit.OK

    monkeypatch.setattr(run_job, "run", job)
    monkeypatch.setattr(compare, "run", job)
    (tmp_path / "experiments").mkdir()

    def sequence(body: str, steps: list[str], *words: str) -> tuple[Ended, list[Any]]:
        lines = "".join(f"    - {step}\n" for step in steps)
        text = f"{HEAD}{body}job:\n  steps:\n{lines}"
        (tmp_path / "experiments" / "mine.yaml").write_text(text)
        seen.clear()
        return cli("experiment=mine", *words), list(seen)

    return sequence


def test_what_an_experiment_sets_beside_its_steps_reaches_each(steps_of: Any) -> None:
    body = "  - override /model: checkpoint\ntracking:\n  folder: far\nprompt:\n  text: a, b=c\n"
    body += "  chat: true\nmodel: {path: /data/x}\nseq_len: 9\n"
    ended, seen = steps_of(body, ["backend=gpu", "backend=neuron", "job=compare"])
    assert ended.exit == 0, ended.err
    assert [config.tracking.folder for config in seen] == ["far"] * 3
    assert [config.prompt.text for config in seen] == ["a, b=c"] * 3
    assert [(config.model.name, config.model.path) for config in seen] == [
        ("checkpoint", "/data/x")
    ] * 3
    assert [config.backend.name for config in seen] == ["gpu", "neuron", "gpu"]
    assert all(config.prompt.chat and config.seq_len == 9 for config in seen)


def test_a_step_beats_the_experiment_and_the_command_line_beats_both(steps_of: Any) -> None:
    body = "  - override /backend: neuron\nseq_len: 9\nthreads: 1\ndtype: bfloat16\n"
    steps = ["seq_len=8 threads=2 dtype=float32", "backend=gpu"]
    ended, seen = steps_of(body, steps, "threads=3", "tracking.folder=here")
    assert ended.exit == 0, ended.err
    assert [config.seq_len for config in seen] == [8, 9]
    assert [config.threads for config in seen] == [3, 3]
    assert [config.dtype.value for config in seen] == ["float32", "bfloat16"]
    assert [config.backend.name for config in seen] == ["neuron", "gpu"]
    assert {config.tracking.folder for config in seen} == {"here"}


def test_what_is_typed_is_shown_in_its_place(steps_of: Any, tmp_path: Path) -> None:
    steps = ["backend=gpu model=tiny_minimax_m2 seq_len=8", "backend=neuron model=tiny_minimax_m2"]
    ended, seen = steps_of("", steps, "seq_len=4", f"model={tmp_path / 'a model'}")
    assert ended.exit == 0, ended.err
    mine = f"'model.path={tmp_path}/a model'"
    assert f"[1 of 2] python run.py backend=gpu {mine} seq_len=4\n" in ended.out
    assert f"[2 of 2] python run.py backend=neuron {mine}\n" in ended.out
    assert [(each.model.name, each.model.prompt) for each in seen] == [("checkpoint", None)] * 2


def test_what_the_steps_differ_in_cannot_be_typed(steps_of: Any) -> None:
    ended, seen = steps_of("", ["backend=gpu", "backend=neuron"], "backend=neuron")
    assert (ended.exit, seen) == (2, [])
    assert "backend= is what the steps differ in (backend=gpu, backend=neuron)" in ended.err


def test_values_of_an_option_stay_out_of_a_step_that_chose_another(steps_of: Any) -> None:
    body = "  - override /inputs: random\ninputs: {seed: 5}\n"
    ended, seen = steps_of(body, ["layer=1 scope=single", "inputs=prompt", "inputs=random"])
    assert ended.exit == 0, ended.err
    assert [getattr(config.inputs, "seed", None) for config in seen] == [5, None, 5]


def test_a_runs_id_that_looks_like_a_number_is_text_in_a_step(steps_of: Any) -> None:
    ended, (step,) = steps_of("", ["job=compare golden=54579e35"])
    assert (ended.exit, step.golden) == (0, "54579e35"), ended.err


def test_a_step_may_be_an_experiment_whose_keys_are_its_own(steps_of: Any) -> None:
    body = "start: 5\nend: 5\nseq_len: 9\n"
    ended, seen = steps_of(body, ["experiment=layer_range", "scope=range"])
    assert ended.exit == 0, ended.err
    assert [(config.start, config.end) for config in seen] == [(0, 3), (5, 5)]
    assert [config.backend.name for config in seen] == ["neuron", "gpu"]
    assert [config.seq_len for config in seen] == [9, 9]


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("backend=nueron", "There is no backend 'nueron'. Did you mean 'neuron'?"),
        ("layre=3", "There is no key 'layre'. Did you mean 'layer'?"),
        ("tp_degree=two", "two is no value of tp_degree"),
        ("layer=0,1", "is a list of values"),
        ("compare", "Did you mean job=compare?"),
        ("inputs=prompt inputs.file=x", "belongs to inputs=tokens"),
        ("experiment=layer_sweep", "a step cannot be a sweep"),
        ("experiment=mine", "a step cannot be a sequence"),
    ],
)
def test_a_mistake_in_a_step_names_it_before_any_step_runs(
    steps_of: Any, step: str, says: str
) -> None:
    ended, seen = steps_of("", ["backend=gpu", step])
    assert ended.exit == 2, ended.err
    assert seen == []
    (line,) = ended.err.strip().splitlines()
    assert line.startswith(f"layerparity: Step 2 of 2 ({step}): ")
    assert says in line


@pytest.fixture
def without_torch_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide torch_xla; return the folder that stands for /dev."""
    found = neuron.importlib.util.find_spec
    monkeypatch.setattr(
        neuron.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "torch_xla" else found(name, *more),
    )
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(neuron, "DEVICE_FILES", devices)
    monkeypatch.setattr(neuron.neuron_flavour, "installed", lambda: None)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    return devices


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the configurations of the jobs that ran, which do nothing else."""
    seen: list[Any] = []
    for job in (run_job, compare):
        monkeypatch.setattr(job, "run", lambda config: seen.append(config) or Exit.OK)
    return seen


LAST = "note: step 2 was not backend=neuron: this is no verdict on that backend"


def test_the_quickstart_without_torch_xla_has_another_candidate_and_says_so(
    cli: Cli, without_torch_xla: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = cli("experiment=quickstart")
    assert ended.exit == 0, ended.err
    assert [config.backend.name for config in ran] == ["gpu", "gpu", "gpu"]
    assert ran[1].kind.value == "candidate"
    assert (ran[1].attn_implementation, ran[1].experts_implementation) == ("eager", "eager")
    assert ran[1].generate.max_new_tokens == ran[0].generate.max_new_tokens == 24
    assert "note: torch_xla is not installed" in ended.out
    assert "another implementation, not backend=neuron" in ended.out
    assert "pip install torch==2.9.1 torch_xla==2.9.0" in ended.out
    assert ended.out.strip().splitlines()[-1] == LAST
    # A verdict that is no pass is none on Neuron either; without one there is nothing to say.
    monkeypatch.setattr(compare, "run", lambda config: Exit.FAILED)
    ended = cli("experiment=quickstart")
    assert (ended.exit, ended.out.strip().splitlines()[-1]) == (1, LAST)
    monkeypatch.setattr(run_job, "run", lambda config: Exit.USER)
    ended = cli("experiment=quickstart")
    assert (ended.exit, "no verdict" in ended.out) == (2, False)


@pytest.mark.parametrize("has", ["devices", "PJRT_DEVICE", "AWS's package", "XLA that is broken"])
def test_what_lacks_torch_xla_by_mistake_keeps_its_step(
    cli: Cli, without_torch_xla: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch, has: str
) -> None:
    if has == "devices":
        (without_torch_xla / "neuron0").touch()
    elif has == "PJRT_DEVICE":
        monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    elif has == "AWS's package":
        package = neuron.neuron_flavour.Installed(neuron.neuron_flavour.Flavour.XLA, "2.9.0")
        monkeypatch.setattr(neuron.neuron_flavour, "installed", lambda: package)
    else:
        # It is there, and whether it imports is for the run to find out.
        monkeypatch.setattr(neuron.importlib.util, "find_spec", lambda name, *more: name)
    ended = cli("experiment=quickstart")
    assert ended.exit == 0, ended.err
    assert [config.backend.name for config in ran] == ["gpu", "neuron", "gpu"]
    assert "note:" not in ended.out
