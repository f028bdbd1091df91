"""The package as a Python program uses it: what it gives, refuses and leaves alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Ended
from runs import make_run, sites
from safetensors.torch import save_file
from stores import fresh_config

import layerparity
from layerparity.ground.errors import Exit
from layerparity.record.folder import RunFolder
from layerparity.settings import config

CPU = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0", "inputs=random")
LAZY = """
import json, os, sys
sys.path.insert(0, {src!r})
import layerparity
before = sorted(set({heavy!r}) & set(sys.modules))
# What a run imports of others, once for all forks.
import hydra, numpy, torch
for first in {firsts!r}:
    if not os.fork():
        exec(first)
        told = [first, before, layerparity.run.__module__, layerparity.compare.__name__]
        os.write(1, (json.dumps(told) + chr(10)).encode())
        os._exit(0)
    os.wait()
"""
TYPED = """
from pathlib import Path

import layerparity
from layerparity import Comparison, Run, UserError

made: Run = layerparity.run("backend=gpu", scope="full")
judged: Comparison = layerparity.compare(made, Path("there"), "tolerance=fixed")
reveal_type(made.tensor("layers.0:out"))
reveal_type(judged.outcome)
reveal_type(UserError("x").cure)
reveal_type(layerparity.open_run("latest").sites)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a store."""
    monkeypatch.chdir(tmp_path)
    fresh_config(tmp_path / "mlruns")
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> tuple[Path, Path]:
    """Two runs' folders: a golden, and a candidate that is wrong in one place."""
    wrong = sites()
    wrong["layers.1.mlp:out"] = wrong["layers.1.mlp:out"] + 0.5
    make_run(folder / "golden", sites())
    make_run(folder / "candidate", wrong, kind="candidate", backend="neuron")
    return folder / "golden", folder / "candidate"


def caller_state() -> dict[str, Any]:
    """Return what a call must leave as it was."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from omegaconf.basecontainer import BaseContainer

    loggers = [logging.root, logging.getLogger("layerparity"), logging.getLogger("mine")]
    return {
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "loggers": [(x.level, list(x.handlers), x.propagate, x.disabled) for x in loggers],
        "hydra": (GlobalHydra.instance().hydra, HydraConfig.instance().cfg),
        "singletons": dict(Singleton._instances),
        "groups": sorted(ConfigStore.instance().repo),
        "plugins": [len(each) for each in Plugins.instance().plugin_type_to_subclass_list.values()],
        "resolvers": dict(BaseContainer._resolvers),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
    }


def test_the_package_is_light_and_its_run_is_called_however_it_was_imported(
    tmp_path: Path,
) -> None:
    """Each way is the first in a process of its own, a fork of one that has the package alone."""
    heavy = ("torch", "hydra", "omegaconf", "mlflow", "pandas", "numpy", "transformers")
    firsts = (
        "",
        "import layerparity.making.request.scope",
        "from layerparity import run",
        "layerparity.run",
    )
    code = LAZY.format(src=str(ROOT / "src"), heavy=heavy, firsts=firsts)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert told == [[first, [], "layerparity.cli.python", "compare"] for first in firsts], (
        ended.stderr
    )


def test_a_type_checker_sees_what_is_called(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    # With what `make type` left: to read torch anew takes most of a minute.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", program],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    revealed = [line.split('"')[1] for line in checked.stdout.splitlines() if "Revealed" in line]
    assert revealed == [
        "torch._tensor.Tensor",
        "layerparity.record.verdict.Outcome",
        "str",
        "list[str]",
    ]


def test_two_runs_and_their_comparison_leave_the_caller_as_he_was(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that has composed with Hydra and MLflow himself goes on as if nothing had been."""
    import mlflow
    from hydra import compose, initialize_config_dir

    (folder / "mine").mkdir()
    (folder / "mine" / "app.yaml").write_text("a: 1\n")
    # MLflow puts it into the environment, where later tests would read it.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/theirs.db")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/theirs.db")
    open_before = mlflow.start_run().info.run_id
    torch.set_num_threads(2)
    with initialize_config_dir(version_base=None, config_dir=str(folder / "mine")):
        before = caller_state()
        golden = layerparity.run(*CPU, name="golden", threads=1)
        mine = layerparity.run(*CPU, kind="candidate", attn_implementation="eager")
        judged = layerparity.compare(golden, mine)
        after = caller_state()
        assert {name: after[name] for name in after if after[name] != before[name]} == {}
        assert compose("app") == {"a": 1}
    assert mlflow.active_run().info.run_id == open_before
    assert mlflow.get_tracking_uri() == f"sqlite:///{folder}/theirs.db"
    mlflow.end_run()
    assert (golden.name, golden.kind, mine.kind) == ("golden", "golden", "candidate")
    assert judged.outcome == "pass"
    assert "PASS" in capsys.readouterr().out
    assert torch.equal(golden.tensor("layers.0:in"), mine.tensor("layers.0:in"))
    # What the calls made is what commands find.
    assert layerparity.open_run("golden").id == layerparity.open_run(golden.id[:10]).id == golden.id
    assert layerparity.open_comparison().id == judged.id
    assert layerparity.run(*CPU, name="golden", threads=1, reuse=True).id == golden.id


def test_calls_in_threads_take_turns(pair: tuple[Path, Path]) -> None:
    """Neither is on the main thread, where alone Python takes signal handlers."""
    ended: dict[int, Any] = {}

    def call(number: int) -> None:
        try:
            ended[number] = layerparity.compare(*pair, tolerance="fixed")
        except Exception as error:
            ended[number] = error

    before = caller_state()
    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [getattr(ended[n], "outcome", ended[n]) for n in (0, 1)] == ["fail", "fail"]
    assert ended[0].id != ended[1].id
    assert caller_state() == before


APP = """
import hydra
import layerparity
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    words = ("backend=gpu", "device_map=cpu", "scope=single", "inputs=random")
    run = layerparity.run(*words, layer=config.layer, tracking={{"folder": "{store}"}})
    print("made", run.manifest.stages, HydraConfig.get().job.name)

main()
"""


def test_a_hydra_application_of_ones_own_runs_it(tmp_path: Path) -> None:
    """Hydra keeps one state a process, and it is the application's."""
    app = tmp_path / "mine.py"
    app.write_text(APP.format(store=tmp_path / "mlruns"), encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [sys.executable, str(app), "-m", "+layer=1,3"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    made = [line for line in ended.stdout.splitlines() if line.startswith("made")]
    assert made == ["made ['layers.1'] mine", "made ['layers.3'] mine"]


def test_a_comparison_is_a_frame_and_a_verdict(pair: tuple[Path, Path]) -> None:
    judged = layerparity.compare(*pair, "tolerance=fixed")
    assert (judged.outcome, judged.where) == ("fail", "layers.1.mlp:out")
    assert judged.verdict.exit is Exit.FAILED
    assert judged.report.is_file()
    rows = judged.rows
    assert list(rows.columns[:9]) == [
        "site",
        "layer",
        "component",
        "phase",
        "step",
        "kind",
        "outcome",
        "reason",
        "judged_by",
    ]
    texts = ("site", "component", "phase", "kind", "outcome", "reason", "judged_by")
    assert {str(rows[name].dtype) for name in texts} == {"str"}
    assert (str(rows["layer"].dtype), str(rows["step"].dtype)) == ("Int64", "int64")
    assert {str(dtype) for dtype in rows.dtypes.iloc[9:]} == {"float64"}
    assert len(rows) == judged.verdict.total
    (wrong,) = rows[rows.outcome == "fail"].itertuples()
    assert (wrong.site, wrong.layer) == ("layers.1.mlp:out", 1)
    assert wrong.max_abs_diff == pytest.approx(0.5, rel=1e-5)
    assert rows[rows.site == "norm:out"]["layer"].isna().all()
    golden = layerparity.open_run(pair[0])
    assert golden.tensor(judged.where).shape
    # A verdict may name a module: its tensors are what can be asked for.
    with pytest.raises(layerparity.UserError, match=r"module, whose tensors here are .*1\.mlp:out"):
        golden.tensor("layers.1.mlp")


def test_what_a_notebook_shows_is_whole_and_escaped(pair: tuple[Path, Path]) -> None:
    judged = layerparity.compare(*pair, tolerance="fixed", name="<b>mine</b>")
    shown = judged._repr_html_()
    assert "FAIL at layers.1.mlp:out" in shown
    assert shown.count("<table>") == shown.count("</table>") == 1
    assert "whole model: " in shown
    assert "<b>mine" not in layerparity.open_run(pair[0])._repr_html_() + shown
    assert "<b>mine</b>" in repr(judged)
    (pair[0].parent / "<i>").mkdir()
    odd = make_run(pair[0].parent / "<i>" / "<u>", sites())
    assert "&lt;u&gt;" in layerparity.open_run(odd.folder)._repr_html_()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: layerparity.run(lyer=3), "There is no key 'lyer'. Did you mean 'layer'?"),
        (lambda: layerparity.run("scop=full"), "There is no key 'scop'. Did you mean 'scope'?"),
        (lambda: layerparity.run(model__pth="x"), "Did you mean 'model.path'?"),
        (lambda: layerparity.run(model={"pth": "x"}), "Did you mean 'model.path'?"),
        (lambda: layerparity.run(backend="gpuu"), "There is no backend 'gpuu'. Did you mean 'gpu'"),
        (lambda: layerparity.run(layer="three"), "is no value of layer: give a whole number"),
        (lambda: layerparity.run(3), "3 is no word of a command"),
        (lambda: layerparity.open_run(None), "None names no run"),
        (lambda: layerparity.open_comparison(""), "'' names no run"),
        (lambda: layerparity.run("layer=1,2"), "for each of them, call this function once."),
        (lambda: layerparity.run("job=audit"), "type it: python run.py job=audit"),
        (lambda: layerparity.run("experiment=quickstart"), "ask for job=sequence"),
        (lambda: layerparity.run("hydra.verbose=true"), "is for the command line: leave it out."),
        (lambda: layerparity.compare(what="weights"), "job=compare what=weights"),
        (lambda: layerparity.open_run("nobody"), "There are no runs in "),
        (lambda: layerparity.open_run(Path("nowhere")), "There is no folder "),
        (lambda: layerparity.open_run(Path()), "No manifest.json in "),
        (lambda: layerparity.compare("latest", "latest"), "There is no finished|There are no runs"),
        (lambda: layerparity.bisect(good={"dtype": "float32"}, bad={"dtype": "float32"}), "differ"),
    ],
)
def test_mistakes_are_exceptions_with_the_message_of_the_command(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    call: Callable[[], object],
    says: str,
) -> None:
    with pytest.raises(layerparity.UserError) as raised:
        call()
    assert any(each in str(raised.value) for each in says.split("|"))
    # The message is all there is: neither a traceback nor what Hydra said before us.
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None
    assert capsys.readouterr().err == ""


def test_a_mistake_leaves_nothing_behind(folder: Path) -> None:
    before = caller_state()
    for _ in range(2):
        with pytest.raises(layerparity.UserError, match="no key"):
            layerparity.run(lyer=3)
    assert caller_state() == before
    assert sorted(path.name for path in folder.iterdir()) == ["mlruns"]


def test_a_name_that_is_not_public_is_not_there() -> None:
    assert {"run", "compare", "bisect", "open_run", "Run", "UserError"} <= set(dir(layerparity))
    with pytest.raises(AttributeError, match="no attribute 'comparee'"):
        layerparity.comparee  # noqa: B018


def test_only_a_tensors_own_bytes_are_read(tmp_path: Path) -> None:
    """Of a file of 64 MB, what is mapped into memory is the tensor that was asked for."""
    count, each = 64, 262_144
    tensors = {f"layers.{n}:out": torch.full((1, 1, each), float(n)) for n in range(count)}
    stored = make_run(tmp_path / "run", tensors, stages=[f"layers.{n}" for n in range(count)])
    whole = tmp_path / "run" / "tensors" / "all.safetensors"
    save_file(tensors, whole)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    for record in manifest["records"]:
        record["file"] = "tensors/all.safetensors"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    del stored
    opened = layerparity.open_run(tmp_path / "run")
    assert len(opened.sites) == count
    assert resident(whole) == 0
    value = opened.tensor("layers.40:out")
    assert float(value[0, 0, -1]) == 40.0
    # The kernel maps the pages beside one that is touched, 16 of them, at both ends.
    assert 4 * each <= resident(whole) <= 4 * each + 2 * 65_536
    with pytest.raises(layerparity.UserError, match=r"holds no 'layers.40:oot'\. Did you mean"):
        opened.tensor("layers.40:oot")


def resident(path: Path) -> int:
    """Return how many bytes of a file this process has mapped and touched."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_a_damaged_tensor_is_refused_when_it_is_read(pair: tuple[Path, Path]) -> None:
    opened = layerparity.open_run(pair[0])
    file = pair[0] / RunFolder(pair[0]).read_manifest().records[-1].file
    save_file({"lm_head:out": torch.zeros(2, 5, 11)}, file)
    with pytest.raises(layerparity.UserError, match="its bytes are not those"):
        opened.tensor("lm_head:out")
    assert opened.tensor("norm:out").shape == (2, 5, 8)


def test_a_comparison_is_not_opened_as_a_run(pair: tuple[Path, Path]) -> None:
    judged = layerparity.compare(*pair, tolerance="fixed")
    with pytest.raises(layerparity.UserError, match="open it with open_comparison"):
        layerparity.open_run(judged.id)
    with pytest.raises(layerparity.UserError, match=r"holds no verdict\.json"):
        layerparity.open_comparison(pair[0])
    with pytest.raises(layerparity.UserError, match=r"holds no bisection\.json"):
        layerparity.open_bisection(judged.id)


def test_values_of_every_kind_reach_their_keys() -> None:
    """Texts that mean something to Hydra stay texts; a mapping is several keys, or a value."""
    from layerparity.cli import python

    keys = {
        "prompt__text": "a, b = ${c} 'd' \"e\"",
        "model": {"path": Path("/models/a b")},
        "reuse": True,
        "layer": 3,
        "golden": None,
        "capture": {"exclude": ["mlp.*", "3"]},
        "job": {"good": {"dtype": "float32", "threads": 1}},
    }
    with python._job("bisect", (), keys) as composed:
        assert isinstance(composed, config.Config)
        assert composed.prompt.text == keys["prompt__text"]
        assert composed.model.path == "/models/a b"
        assert (composed.reuse, composed.layer, composed.golden) == (True, 3, None)
        assert composed.capture.exclude == ["mlp.*", "3"]
        assert dict(composed.job.good) == {"dtype": "float32", "threads": 1}


def test_a_bisection_names_the_wrong_block_and_a_sweep_is_one_run(
    run: Callable[..., Ended], store: Path
) -> None:
    """Of a store that commands filled; its golden has every component."""
    where = f"tracking.folder={store}"
    port = {"name": "qk_norm_per_head", "layers": [2]}
    words = (where, "backend=gpu", "device_map=cpu", "port=fault")
    found = layerparity.bisect(*words, golden="the-golden", port=port, name="bisected")
    assert found.guilty.startswith("layers.2.self_attn")
    assert found.verdict is not None
    assert found.verdict.causes[0].id in found.conclusion["causes"][0]["id"]
    assert bool(found.steps.wrong.any())
    assert "layers.2" in found._repr_html_()
    assert layerparity.open_bisection("latest", where).id == found.id
    parts = ("-m", "kind=candidate", "device_map=cpu", "scope=single", "layer=1,2", "name=parts")
    ended = run(*parts, "golden=the-golden", "hydra/launcher=basic")
    assert ended.exit == 0, ended.err
    sweep = layerparity.open_run("parts", where)
    assert len(sweep.parts) == 2
    assert sweep.tensor("layers.1:out").shape == sweep.tensor("layers.2:out").shape
    judged = layerparity.compare("the-golden", sweep, where)
    assert judged.outcome == "pass"
    assert set(judged.rows.layer.dropna()) == {1, 2}
