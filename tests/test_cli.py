"""The command line: help, completion, exit statuses, and mistakes answered with their cure."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Ended

from layerparity import __version__
from layerparity.cli import help as help_text
from layerparity.cli.command import check
from layerparity.ground.errors import UserError
from layerparity.ground.quoting import quoted
from layerparity.settings import config
from layerparity.settings.key import keys_of

GROUPS = [*help_text.GROUPS, "job", "experiment"]

PROBE = """
import json, sys
sys.argv = ["run.py", *{arguments!r}]
sys.path.insert(0, {src!r})
from layerparity.cli.door import main
code = main()
heavy = {{"torch", "mlflow", "transformers", "torch_xla", "numba"}} & set(sys.modules)
print(json.dumps([code, sorted(heavy)]), file=sys.stderr)
"""


def probe(folder: Path, *arguments: str, **environment: str) -> tuple[int, list[str], str]:
    """Run a command in a fresh process: its exit, heavy imports and output."""
    code = textwrap.dedent(PROBE).format(arguments=list(arguments), src=str(ROOT / "src"))
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    exit_code, heavy = json.loads(ended.stderr.strip().splitlines()[-1])
    return exit_code, heavy, ended.stdout + ended.stderr


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["--help"], 0, "experiment="),
        (["layre=3"], 2, "Did you mean 'layer'?"),
        (["--cfg", "job"], 0, "tp_degree: 1"),
    ],
)
def test_light_commands_import_nothing_heavy(
    tmp_path: Path, arguments: list[str], exit_code: int, says: str
) -> None:
    ended, heavy, output = probe(tmp_path, *arguments)
    assert (ended, heavy) == (exit_code, [])
    assert says in output


@pytest.mark.fresh_interpreter
def test_completion_offers_choices_and_imports_nothing_heavy(tmp_path: Path) -> None:
    line = {"COMP_LINE": "run.py backend=", "COMP_POINT": "15"}
    ended, heavy, output = probe(tmp_path, "-sc", "query=bash", **line)
    assert (ended, heavy) == (0, [])
    assert "backend=gpu" in output
    assert "backend=neuron" in output


def test_help_has_every_choice_on_two_screens() -> None:
    text = help_text.text()
    lines = text.splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 120
    for group in (*help_text.GROUPS, "job", "experiment"):
        options = help_text.options(group)
        assert options, group
        whole = text if group in ("job", "experiment") else help_text.answer([f"{group}=", "-h"])
        for name, line in options.items():
            assert line, f"{group}/{name} has no first line"
            assert re.search(rf"\b{name}\b", text) or name == "sequence", f"{group}={name}"
            assert " ".join(line.split()) in " ".join(whole.split()) or name == "sequence"


def test_every_job_stands_under_one_heading_but_the_one_that_experiments_use() -> None:
    named = [name for names in help_text.headings().values() for name in names]
    assert len(named) == len({*named})
    assert {*help_text.options("job")} - {*named} == {"sequence"}
    said = [line for line in help_text.text().splitlines() if line.endswith("(job=)")]
    assert said == [f"{name.capitalize()} (job=)" for name in help_text.headings()]


def test_every_key_is_in_the_help_of_a_job_or_a_group() -> None:
    told = "".join(help_text.answer([f"job={name}"]) for name in help_text.options("job"))
    of_group = {group: help_text.answer([f"{group}=", "--help"]) for group in help_text.GROUPS}
    keys = {key for key in config.every_key() if "." in key}
    named = {key for key in keys if key.endswith((".name", "scope.kind", "device_map.strategy"))}
    every = told + "".join(of_group.values())
    assert [key for key in sorted(keys - named) if f"  {key}=" not in every] == []
    assert re.search(r"^  job\.margin=1\.5 +factor", told, re.M)
    assert re.search(
        r"^  backend\.compile=false\|lazy +backend=gpu,neuron: ", of_group["backend"], re.M
    )
    assert re.search(r"^  tracking\.folder=mlruns +where runs are kept", of_group["tracking"], re.M)
    assert re.search(r"^  tolerance\.error_ratio=2 +tolerance=cal", of_group["tolerance"], re.M)
    assert of_group["scope"].startswith("scope=: how much of it\n  full ")
    # As a word of its own, or as it stands in a command; of several, the whole.
    for words in (["tolerance", "--help"], ["tolerance=fixed", "-h"]):
        assert help_text.answer(words) == of_group["tolerance"]
    assert help_text.answer(["backend=gpu", "scope=full", "--help"]) == help_text.text()
    assert help_text.answer(["compare", "--help"]) == help_text.answer(["job=compare"])
    # Keys that belong to no choice of options.
    asked = help_text.answer(["prompt=", "--help"])
    assert asked.startswith("Its keys and their defaults\n  prompt.chat=false ")


def test_a_jobs_own_help_has_its_keys_and_no_others() -> None:
    jobs = help_text.options("job")
    helped = {name: help_text.answer([f"job={name}", "--help"]) for name in jobs}
    shown = {name: re.findall(r"^  ([\w.]+)=\S* +\S", text, re.M) for name, text in helped.items()}
    own = {f"job.{name}": [] for name in jobs}
    for _, option, settings in (each for each in config.plugin_schemas() if each[0] == "job"):
        own[f"job.{option}"] = [each.path for each in keys_of(settings, "job.")]
    for name, line in jobs.items():
        assert helped[name].startswith(f"job={name}: {line}\n")
        asked = [key for key in shown[name] if key.startswith("job.")]
        assert asked == [key for key in own[f"job.{name}"] if key != "job.name"]
    assert {"golden", "candidate", "what", "name"} <= {*shown["compare"]}
    assert {"layer", "start", "end", "dtype", "golden"} <= {*shown["run"]}
    assert (shown["import"], shown["judge"]) == (["run"], ["run", "name"])
    assert all(each in jobs for key in keys_of(config.Config) for each in key.jobs or ())
    # What names no job, or several, is answered with everything.
    for words in (["--help"], ["job=none", "-h"], ["job=run", "job=plan", "help"]):
        assert help_text.answer(words) == help_text.text()


def test_every_key_says_what_it_does() -> None:
    keys = list(keys_of(config.Config))
    for group, _, settings in config.plugin_schemas():
        keys += keys_of(settings, f"{group}.")
    # A group is described by its options, and an option by its YAML, which these keys name.
    options = {"port._target_", *(f"{group}.{key}" for group, key in config.NAMED_BY.items())}
    options |= {f"{group}.name" for group in GROUPS if group != "port"}
    assert len(keys) > 100
    assert [
        key.path
        for key in keys
        if not key.help and key.path not in options and key.path not in GROUPS
    ] == []


@pytest.mark.parametrize(
    "value", ["a, b", "x=y", 'say "hi"', "it's", "back\\slash", " padded ", "{"]
)
def test_the_quoted_answer_is_taken_as_it_stands(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (word,) = shlex.split(quoted(f"prompt.text={value}"))
    assert OverridesParser.create().parse_override(word).value() == value


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["backend=nueron"], "There is no backend 'nueron'. Did you mean 'neuron'?"),
        (["experiment=quikstart"], "Did you mean 'quickstart'?"),
        (["job=compair"], "Did you mean 'compare'?"),
        (["--multi-run"], "--multi-run"),
        (["compare"], "Did you mean job=compare?"),
        (["backend", "gpu"], "Write backend= and one of: gpu, neuron."),
        (["layre=3"], "Did you mean 'layer'?"),
        (["inputs=random", "inputs.sed=1"], "Did you mean 'inputs.seed'?"),
        (["inputs=auto", "inputs.file=x"], "belongs to inputs=tokens: choose that, or leave"),
        (["port.name=router_softmax"], "belongs to port=clean and port=fault: choose one"),
        (["tp_degree=two"], "tp_degree=two is no value of tp_degree: give a whole number."),
        (["reuse=maybe"], "reuse=maybe is no value of reuse: give true or false."),
        (
            ["backend=gpu", "backend.compile=trace"],
            "give true or false, or use backend=neuron, whose backend.compile takes trace.",
        ),
        (["tracking.folder=x", "tolerance.error_ratio=y"], "tolerance.error_ratio: give a number."),
        (["port=nxdi"], "port=nxdi runs a class of your own: name it with port.model="),
        (["device_map=0"], "There is no device_map '0'."),
        (["prompt.text=hi, there"], """'prompt.text="hi, there"'"""),
        (["prompt.text=a=b"], """'prompt.text="a=b"'"""),
        (['prompt.text=say "hi" now'], r"""'prompt.text="say \"hi\" now"'"""),
        (["max_memory=0:60GB,1:60GB"], """'max_memory="0:60GB,1:60GB"'"""),
        (["model.path=/data/a=b"], """'model.path="/data/a=b"'"""),
    ],
)
def test_mistakes_cost_one_line(cli: Callable[..., Ended], arguments: list[str], says: str) -> None:
    ended = cli(*arguments)
    assert ended.exit == 2
    assert says in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert ended.out == ""
    assert list(Path.cwd().iterdir()) == []


def test_a_list_may_be_swept() -> None:
    check(["-m", "layer=0,1"])
    with pytest.raises(UserError, match="add -m"):
        check(["layer=0,1"])


@pytest.mark.parametrize(
    "choice",
    [f"{group}={name}" for group in GROUPS for name in help_text.options(group)]
    + ["device_map=cuda:3"],
)
def test_every_yaml_composes(choice: str) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from layerparity.ground.resources import shipped
    from layerparity.settings import config, search_path

    config.register()
    search_path.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        made = OmegaConf.to_object(compose("config", overrides=[choice]))
    assert isinstance(made, config.Config)
    if choice == "device_map=cuda:3":
        assert made.device_map.strategy == "cuda:3"


def test_experiments_are_found_from_the_current_folder_too(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    own = tmp_path / "experiments"
    own.mkdir()
    (own / "mine.yaml").write_text("# @package _global_\n# Mine?\ntp_degree: 7\n")
    ended = cli("--cfg", "job", "experiment=mine")
    assert ended.exit == 0
    assert "tp_degree: 7" in ended.out
    assert "Mine?" in help_text.text()


def test_two_doors_are_one(tmp_path: Path) -> None:
    for command in ([str(ROOT / "run.py")], ["-m", "layerparity"]):
        ended = subprocess.run(
            [sys.executable, *command, "job=compare", "--version"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            check=False,
            text=True,
        )
        assert ended.stdout == f"layerparity {__version__}\n", ended.stderr


def test_a_python_without_the_packages_is_told_where_they_are(tmp_path: Path) -> None:
    # Without site-packages: as the system's Python, beside the environment.
    words = [sys.executable, "-I", "-S", str(ROOT / "run.py"), "job=doctor"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "source .venv/bin/activate" in ended.stderr
