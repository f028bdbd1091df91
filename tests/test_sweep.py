"""Sweeps: a multirun has one parent run, which ends as its children and the command did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
from omegaconf import OmegaConf
from stores import fresh_config

from layerparity.making import next_step, sweep
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

CONFIG = """
defaults:
  - _self_
  - job: run
name: null
layer: 0
tracking: {name: embedded, folder: '%s', experiment: layerparity}
hydra:
  run: {dir: .}
  output_subdir: null
  sweep: {dir: '%s', subdir: .}
  job: {chdir: false}
  callbacks: {sweep_parent: {_target_: layerparity.making.sweep.SweepParent}}
"""


@pytest.fixture
def tracking(tmp_path):
    return fresh_config(tmp_path / "runs")


@pytest.fixture
def multirun(tmp_path, tracking, monkeypatch):
    """Return a function that runs a real Hydra multirun of a function over ``layer``."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "conf" / "job").mkdir(parents=True)
    text = CONFIG % (tracking.folder, tmp_path / "sweeps")
    (tmp_path / "conf" / "config.yaml").write_text(text)
    for job in ("run", "compare"):
        (tmp_path / "conf" / "job" / f"{job}.yaml").write_text(f"name: {job}\n")
    monkeypatch.chdir(tmp_path)

    def run(job, *overrides):
        monkeypatch.setattr(sys, "argv", ["run.py", "-m", *overrides])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        GlobalHydra.instance().clear()
        try:
            hydra.main(
                version_base="1.3", config_path=str(tmp_path / "conf"), config_name="config"
            )(job)()
        finally:
            rows = sweep.close_parent().rows
        return rows

    yield run
    assert sweep.PARENT_VARIABLE not in os.environ
    assert sweep.close_parent().rows == []


def child_run(config):
    """Do what job=run does with the parent's id."""
    parent = os.environ.get(sweep.PARENT_VARIABLE)
    store = open_store(config.tracking)
    tags = {"backend": "neuron", "scope": f"layer {config.layer}"}
    with store.start(f"layer {config.layer}", "candidate", tags, {}, parent=parent) as run:
        run.log_metrics([("layer/x", float(config.layer), config.layer)])
        if config.layer == 13:
            raise KeyboardInterrupt
        if config.layer == 7:
            raise ValueError("no such luck")


def the_sweep(tracking):
    (found,) = open_store(tracking).runs(kind="sweep")
    return found


def test_a_multirun_has_one_parent(multirun, tracking):
    rows = multirun(child_run, "layer=range(0,3)")
    store, parent = open_store(tracking), the_sweep(tracking)
    assert [row[:2] for row in rows] == [(f"layer {n}", "FINISHED") for n in range(3)]
    assert [row.url for row in rows] == [run.url for run in store.find(parent.id)]
    assert parent.name == "sweep layer=range(0,3)", "its parts are called nothing alike"
    assert parent.status == "FINISHED"
    assert (parent.tags["children"], parent.tags["children.finished"]) == ("3", "3")
    assert parent.tags["backend"] == "neuron", "what all children share"
    assert "scope" not in parent.tags
    points = store._connection.client.get_metric_history(parent.id, "layer/x")
    assert {point.step: point.value for point in points} == {0: 0.0, 1: 1.0, 2: 2.0}


def test_a_failed_child_fails_the_parent(multirun, tracking):
    with pytest.raises(ValueError, match="no such luck"):
        multirun(child_run, "layer=6,7,8")
    parent = the_sweep(tracking)
    assert parent.status == "FAILED" and parent.tags["children.failed"] == "1"
    assert parent.tags["error"] == "ValueError: no such luck"


def test_ctrl_c_kills_the_parent(multirun, tracking):
    with pytest.raises(KeyboardInterrupt):
        multirun(child_run, "layer=12,13,14")
    parent = the_sweep(tracking)
    assert (parent.status, parent.tags["error"]) == ("KILLED", "stopped by Ctrl-C")
    assert (parent.tags["children"], parent.tags["children.killed"]) == ("2", "1")


def test_a_stopped_sweep_counts_the_parts_that_it_did_not_begin(tracking, monkeypatch):
    monkeypatch.setenv(sweep.PARTS_VARIABLE, "6 0.0")
    store = open_store(tracking)
    parent = store.begin("sweep", "sweep", {}, {})
    with store.start("layer 0", "candidate", {}, {}, parent=parent.id):
        pass
    sweep._open.append((store, parent, ["scope=single", "layer=range(0,6)"]))
    closed = sweep.close_parent(error=KeyboardInterrupt())
    assert (len(closed.rows), closed.total) == (1, 6)
    words = "-m scope=single 'layer=range(0,6)' reuse=true"
    assert next_step.after_sweep(closed) == f"python run.py {words}"
    assert next_step.after_sweep(closed._replace(rows=[], children=[])).endswith(words)
    whole = closed._replace(total=1)
    assert " job=compare " in next_step.after_sweep(whole)


def test_a_sweep_goes_on_without_what_was_refused():
    closed = sweep.ClosedSweep([], [], "0123456789", ["dtype=float32,bfloat16", "layer=0,9"], 4)
    words = [f"dtype={dtype} layer=9" for dtype in ("float32", "bfloat16")]
    both = next_step.after_sweep(closed._replace(runless=tuple(words)), words)
    again, named = both.split("\n")
    assert again == "python run.py -m dtype=float32,bfloat16 layer=0 reuse=true"
    assert "(not in it " in named and named.endswith(
        "dtype=float32 layer=9, dtype=bfloat16 layer=9)"
    )
    one = next_step.after_sweep(closed._replace(runless=(words[0],)), words)
    assert "layer=0,9" in one and "(still in it, and refused again" in one
    assert "\n" not in next_step.after_sweep(closed._replace(runless=(words[0],)), [])


@pytest.mark.parametrize(("score", "says"), [(0, "(not here: no torch_xla;"), (1, "")])
def test_a_candidate_that_cannot_run_here_is_for_another_machine(monkeypatch, score, says):
    from layerparity.backends.known import neuron
    from layerparity.machine.device import Affinity

    monkeypatch.setattr(neuron, "affinity", lambda: Affinity(score, "none", "no torch_xla"))
    command, _, remark = next_step._elsewhere("python run.py backend=neuron").partition("\n")
    assert command == "python run.py backend=neuron" and remark.strip().startswith(says)
    assert bool(remark) is (score == 0)


def test_the_name_of_a_sweep_can_be_chosen(multirun, tracking):
    multirun(child_run, "layer=0,1", "name=mine")
    assert [run.name for run in open_store(tracking).find("mine")] == ["layer 0", "layer 1"]


def test_sweeps_of_one_second_have_folders_of_their_own():
    """In one folder each would name the other's jobs of Slurm as its own, after Ctrl-C."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from layerparity.ground.resources import shipped
    from layerparity.settings import config

    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        composed = [compose("config", return_hydra_config=True).hydra.sweep for _ in range(2)]
    first, second = (each.dir for each in composed)
    assert first.startswith("mlruns/sweeps/") and first != second


def test_other_jobs_have_no_parent(multirun, tracking):
    seen = []
    assert multirun(lambda config: seen.append(config.layer), "job=compare", "layer=0,1") == []
    assert seen == [0, 1]
    assert open_store(tracking).runs() == []


def start(tracking, monkeypatch):
    monkeypatch.delenv(sweep.PARENT_VARIABLE, raising=False)
    hydra = {"runtime": {"choices": {"job": "run"}}, "overrides": {"task": []}}
    config = OmegaConf.create({"hydra": hydra, "tracking": vars(tracking), "layer": 0})
    sweep.SweepParent().on_multirun_start(config)
    return config


def test_a_job_that_ended_before_it_had_a_run_fails_the_parent(tracking, monkeypatch):
    child_run(start(tracking, monkeypatch))
    assert [row.status for row in sweep.close_parent(failed=True).rows] == ["FINISHED"]
    assert the_sweep(tracking).status == "FAILED"


def test_a_sweep_without_children_is_no_success(tracking, monkeypatch):
    start(tracking, monkeypatch)
    assert sweep.close_parent().rows == []
    assert the_sweep(tracking).status == "FAILED"


def test_an_outer_parent_is_not_inherited(tracking, monkeypatch):
    monkeypatch.setenv(sweep.PARENT_VARIABLE, "left over")
    config = OmegaConf.create({"hydra": {"runtime": {"choices": {"job": "compare"}}}})
    sweep.SweepParent().on_multirun_start(config)
    assert sweep.PARENT_VARIABLE not in os.environ


def test_composing_imports_no_mlflow():
    program = """
        import sys
        from omegaconf import OmegaConf
        from layerparity.making import sweep
        from layerparity.jobs import ui
        from layerparity.tracking import process, store
        config = OmegaConf.create({"hydra": {"runtime": {"choices": {"job": "compare"}}}})
        sweep.SweepParent().on_multirun_start(config)
        sweep.close_parent()
        print([name for name in ("mlflow", "torch", "sqlalchemy") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.check_output(command, text=True) == "[]\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("layer=0,1", "dtype=float99"),
            "dtype: Invalid value 'float99', expected one of [float64",
        ),
        (("layer=0", "dtype=float32,float99"), "dtype: Invalid value 'float99', expected one of ["),
        (("layer=0,x",), "layer=x is no value of layer: give a whole number."),
        (("layer=0,1", "seq_len=0"), "seq_len=0: give 1 or more."),
        # Which keys there are goes by what is chosen.
        (("layer=0", "tolerance=fixed,calibrated", "dtype=float99,float32"), "'float99', expected"),
        (("layer=0", "tolerance=fixed,calibrated", "seq_len=0"), "seq_len=0: give 1 or more."),
    ],
)
def test_a_sweep_with_a_value_that_is_none_opens_nothing(cli, tmp_path, words, says):
    ended = cli("-m", "backend=gpu", "device_map=cpu", "scope=single", *words)
    assert ended.exit == 2 and says in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_parts_that_do_not_go_together_leave_the_others_alone(cli, tmp_path):
    ended = cli(
        "-m", "backend=gpu", "device_map=cpu", "scope=single", "layer=0", "kind=candidate",
        "inputs=random", "tp_degree=1,3", "moe_ep_degree=2,1",
    )  # fmt: skip
    assert ended.exit == 2
    assert "1 of 4 parts finished" in ended.out


def test_a_part_that_was_refused_has_a_row(cli, tmp_path):
    made = cli(
        "-m", "backend=gpu", "device_map=cpu", "scope=single", "layer=0,9", "kind=candidate",
        "inputs=prompt", "name=mine",
    )  # fmt: skip
    assert made.exit == 2, made.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in made.out.splitlines()]
    refused = [row for row in rows if row[1:2] == ["REFUSED"]]
    assert [row[0] for row in refused] == ["layer=9"]
    assert "layer=9 is out of range" in refused[0][2]
    lines = made.out.splitlines()
    (part,) = [line for line in lines if line.startswith("1 of 2: mine single 0 ")]
    assert re.search(r", \d+ sites, output rms [\d.]+, no NaN or Inf, [\d.]+ s$", part)
    assert "1 of 2 parts finished" in lines
    # The story of a part is in its own log.
    assert not re.search(r"Placement|loading ", made.out)
    assert "Placement" in next(tmp_path.rglob("log.txt")).read_text()
    (parent,) = open_store(the_config(tmp_path)).runs(kind="sweep")
    assert (parent.status, parent.tags["children.refused"]) == ("FAILED", "1")


def test_a_part_that_failed_as_a_run_has_one_row(cli, tmp_path, monkeypatch):
    from layerparity.ground.errors import UserError
    from layerparity.making import write

    def fail(*arguments, **seconds):
        raise UserError("no room")

    monkeypatch.setattr(write, "finish", fail)
    made = cli("-m", "backend=gpu", "device_map=cpu", "scope=single", "layer=0,0", "inputs=prompt")
    assert made.exit == 2, made.err
    assert "REFUSED" not in made.out and made.out.count("FAILED") == 2


def test_a_sweep_of_only_reused_parts_is_the_latest(cli, tmp_path):
    words = ("backend=gpu", "device_map=cpu", "scope=single", "kind=candidate", "inputs=prompt")
    for layer in ("0", "0"):
        assert cli(*words, f"layer={layer}", "name=before", "reuse=true").exit == 0
    again = cli("-m", *words, "layer=0", "reuse=true", "name=again")
    assert again.exit == 0 and re.search(r"^1 of 1: before .*, reused$", again.out, re.M)
    store = open_store(the_config(tmp_path))
    (sweep_run,) = store.runs(kind="sweep")
    (found,) = store.find("latest", "candidate")
    assert found.name == "before"
    assert found.parent == sweep_run.id, "found as a part of the sweep"
    assert cli(*words, "layer=0", "name=after", "capture=blocks").exit == 0
    assert [run.name for run in store.find("latest", "candidate")] == ["after"]


@pytest.mark.parametrize("job", ["run", "compare"])
def test_a_sweep_that_cannot_begin_costs_one_line(cli, job):
    ended = cli("-m", f"job={job}", "scope=single", "layer=0,1", "tracking.folder=/proc/x")
    assert ended.exit == 2, ended.err
    (line,) = ended.err.strip().splitlines()
    assert "Cannot write to /proc/x/sweeps" in line and "tracking.folder=FOLDER" in line
    assert ended.out == ""


def test_a_store_that_cannot_be_opened_ends_the_sweep(cli, tmp_path):
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_text("no database")
    ended = cli("-m", "scope=single", "layer=0,1")
    assert ended.exit == 2, ended.err
    (line,) = ended.err.strip().splitlines()
    assert "mlflow.db cannot be used" in line


def the_config(folder):
    return TrackingConfig(folder=str(folder / "mlruns"))
