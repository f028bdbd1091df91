"""What people who know Hydra type: folders of their own, completion, sweeps that are only shown."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Ended
from hydra.core.override_parser.overrides_parser import OverridesParser

from layerparity.settings import command_keys
from layerparity.settings.config import DType


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of groups as a user keeps one: an option of a group, and two experiments."""
    folder = tmp_path / "theirs"
    files = {
        "backend/tuned.yaml": "name: gpu\ncompile: true\n",
        "experiment/first_block.yaml": "# @package _global_\n"
        "defaults:\n  - override /scope: single\nlayer: 0\n",
        "experiment/nightly/all.yaml": "# @package _global_\ndtype: bfloat16\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def rows_of_features() -> list[tuple[str, str]]:
    """Return command and answer of each row of the table of Hydra's features."""
    page = (ROOT / "docs/how-to/experiments.md").read_text(encoding="utf-8")
    table = page.partition("## Hydra's features")[2].partition("\n## ")[0]
    return re.findall(r"^\|.*?\| `(.*?)` \| `(.*?)` \|$", table, re.MULTILINE)


def test_the_table_of_features_is_read_whole() -> None:
    page = (ROOT / "docs/how-to/experiments.md").read_text(encoding="utf-8")
    table = page.partition("## Hydra's features")[2].partition("\n## ")[0]
    assert len(rows_of_features()) == table.count("\n|") - 2 >= 20


@pytest.fixture
def own_logging() -> Iterator[None]:
    """What --info adds to Python's own log ends with the test, as it does with a command."""
    log = logging.getLogger()
    before, level = list(log.handlers), log.level
    yield
    log.handlers[:] = before
    log.setLevel(level)


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(("command", "says"), rows_of_features())
def test_every_feature_does_what_the_table_says(
    cli: Callable[..., Ended], command: str, says: str
) -> None:
    ended = cli(*shlex.split(command))
    assert says in ended.out + ended.err, ended.err
    assert "internal error" not in ended.err


def composed(ended: Ended) -> list[dict]:
    assert ended.exit == 0, ended.err
    return list(yaml.safe_load_all(ended.out))


@pytest.mark.parametrize("way", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_options_and_experiments_of_ones_own_folder(
    cli: Callable[..., Ended], own: Path, way: str
) -> None:
    words = [way.format(own), "backend=tuned", "--cfg", "job"]
    (first,) = composed(cli(*words, "experiment=first_block"))
    assert (first["backend"]["compile"], first["layer"]) == (True, 0)
    (nightly,) = composed(cli(*words, "experiment=nightly/all"))
    assert nightly["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["my conf é", "a,b"])
def test_a_folder_of_any_name_serves_a_sweep_that_is_shown(
    cli: Callable[..., Ended], own: Path, name: str
) -> None:
    folder = own.rename(own.parent / name)
    words = [f"--config-dir={folder}", "experiment=first_block", "backend=tuned", "layer=0,1"]
    assert [each["layer"] for each in composed(cli("-m", *words, "--cfg", "job"))] == [0, 1]
    other = f'hydra.searchpath=["file://{folder}"]'
    beside = [other, f"--config-dir={ROOT / 'conf'}", *words[1:]]
    assert len(composed(cli("-m", *beside, "--cfg", "job"))) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config-dir=absent"], "--config-dir names absent, which is no folder"),
        (["hydra.searchpath=[pkg://no_such_package]"], "no_such_package, which is not installed"),
        (["+experiment=quickstart"], "write experiment=quickstart"),
        (["+backend=gpu"], "write backend=gpu"),
        (["+tp_degre=2"], "There is no key 'tp_degre'. Did you mean 'tp_degree'?"),
        (["++tracking.foldr=x"], "There is no key 'tracking.foldr'. Did you mean"),
        (["--experimental-rerun=job.pickle"], "opens a pickle, which runs what it holds"),
        (["--config-name=other"], "Cannot find primary config 'other'"),
        (["hydra.mode=MULTIRUN", "dtype=fp64,no"], "'no'"),
        (["hydra.verbos=true"], "Did you mean 'hydra.verbose'? --cfg hydra lists Hydra's."),
        (["hydra.launcher.n_job=1"], "'hydra.launcher.n_job'. --cfg hydra lists Hydra's."),
        (["hydra/lancher=workers"], "Did you mean 'hydra/launcher'? There is: hydra/env, "),
        (["hydra/job_logging=jsn"], "Did you mean 'json'? There is: default, disabled, json"),
        (["-m", "layer=0,1", "hydra/launcher=ray"], "no hydra/launcher 'ray'. There is: basic,"),
        (["-m", "scope=single", "layer=range(3,3)", "--cfg", "job"], "This sweep has no parts"),
        (["-m", "layer=range(3,3)", "dry_run=true"], "This sweep has no parts"),
        (["hydra.searchpath=[file://my conf é]"], "'hydra.searchpath=[\"file://my conf é\"]'"),
    ],
)
def test_what_cannot_be_meant_costs_one_line(
    cli: Callable[..., Ended], words: list[str], says: str
) -> None:
    ended = cli(*words)
    assert (ended.exit, len(ended.err.splitlines())) == (2, 1)
    assert says in ended.err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("golden=54579e35", "54579e35"),
        ("candidate=00123456", "00123456"),
        ("+run=12_34", "12_34"),
        ('golden="54579e35"', "54579e35"),
        ("golden=null", None),
        ("candidate='sweep_layer=0,1,2'", "sweep_layer=0,1,2"),
        ("-m candidate=54579e35,1e5,ab12", ["54579e35", "1e5", "ab12"]),
        ("layer=12", 12),
        ("tolerance.error_ratio=1e1", 10.0),
    ],
)
def test_a_number_is_text_where_a_key_takes_text(typed: str, read: object) -> None:
    """A run's id may look like one, and tables show ids without quotes."""
    *_, word = command_keys.as_meant(typed.split())
    override = OverridesParser.create().parse_override(word)
    swept = override.is_sweep_override()
    found = list(override.sweep_string_iterator()) if swept else override.value()
    assert [str(each).strip('"') for each in found] == read if swept else found == read


def test_a_debugger_changes_no_message(cli: Callable[..., Ended]) -> None:
    before = sys.gettrace()
    sys.settrace(before or (lambda *_: None))
    try:
        ended = cli("-m", "dtype=fp64,float99")
    finally:
        sys.settrace(before)
    assert (ended.exit, len(ended.err.splitlines())) == (2, 1)
    assert "Invalid value 'float99', expected one of [" in ended.err


def test_a_sweep_shows_each_job_that_it_would_run(cli: Callable[..., Ended], own: Path) -> None:
    ended = cli("-m", f"--config-dir={own}", "experiment=first_block", "layer=0,2", "--cfg", "job")
    assert [job["layer"] for job in composed(ended)] == [0, 2]
    assert "# job 2 of 2: experiment=first_block layer=2" in ended.out
    swept = composed(cli("-m", "experiment=layer_sweep", "--cfg", "job", "--package", "scope"))
    assert len(swept) == 62


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("experiment=c", {"experiment=clean", "experiment=compiled_parity"}),
        ("dtype=", {f"dtype={each.value}" for each in DType}),
        ("backend=neuron backend.compile=t", {"backend.compile=trace"}),
        ("reuse=", {"reuse=true", "reuse=false"}),
    ],
)
def test_completion_offers_every_value(
    cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, line: str, offers: set[str]
) -> None:
    whole = f"run.py {line}"
    monkeypatch.setenv("COMP_LINE", whole)
    monkeypatch.setenv("COMP_POINT", str(len(whole)))
    assert set(cli("-sc", "query=bash").out.split()) == offers


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_short_names_of_types_are_taken(cli: Callable[..., Ended], short: str, name: str) -> None:
    assert composed(cli(f"dtype={short}", "--cfg", "job"))[0]["dtype"] == name


@pytest.mark.parametrize(
    ("word", "says"),
    [("what=weigts", "Did you mean 'weights'?"), ("zzzzzz=1", "--help lists them.")],
)
def test_a_hint_is_near_or_not_given(cli: Callable[..., Ended], word: str, says: str) -> None:
    err = cli(word).err
    assert says in err
    assert "capture.exclude" not in err
