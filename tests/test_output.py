"""What a program reads of a command: nothing with --quiet, the verdict alone with --json."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import Ended
from report_samples import every_oddity
from runs import MODEL, make_run

from layerparity.cli import output
from layerparity.ground import console
from layerparity.report import keep
from layerparity.report.junit import render_junit

ROOT = Path(__file__).parents[1]
CANDIDATE = ("device_map=cpu", "kind=candidate", "scope=single", "layer=1", "inputs=golden")
WRONG = ("port=fault", "port.name=qk_norm_per_head", "golden=the-golden", "name=wrong")


def test_a_quiet_run_prints_nothing(run: Callable[..., Ended]) -> None:
    assert run(*CANDIDATE, *WRONG, "--quiet") == Ended(0, "", "")


def test_a_verdict_is_all_that_a_program_reads(run: Callable[..., Ended], store: Path) -> None:
    assert run(*CANDIDATE, *WRONG).exit == 0
    command = [sys.executable, str(ROOT / "run.py"), f"tracking.folder={store}", "job=compare"]
    ended = subprocess.run(
        [*command, "golden=the-golden", "candidate=wrong", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    verdict = json.loads(ended.stdout)
    assert verdict["guilty"]["site"].startswith("layers.1.self_attn")
    kept = max(store.glob("artifacts/*/artifacts/verdict.json"), key=lambda p: p.stat().st_mtime_ns)
    assert json.loads(kept.read_text(encoding="utf-8")) == verdict
    # The same where standard output is no file of the system's, as in a notebook.
    inside = run("job=compare", "golden=the-golden", "candidate=wrong", "--json")
    assert inside.exit == 1 and json.loads(inside.out)["guilty"] == verdict["guilty"]


def test_ci_reads_a_case_for_each_stage_and_the_report(
    run: Callable[..., Ended], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run(*CANDIDATE, *WRONG, "reuse=true").exit == 0
    assert run("job=compare", "golden=the-golden", "candidate=wrong").exit == 1
    folder = max(store.glob("artifacts/*/artifacts/junit.xml"), key=lambda p: p.stat().st_mtime_ns)
    suite = ElementTree.parse(folder).getroot()
    cases = {(c.get("classname"), c.get("name")): c for c in suite.iter("testcase")}
    assert suite.get("tests") == str(len(list(suite.iter("testcase"))))
    assert int(suite.get("failures") or 0) == 1
    (failure,) = cases["prefill", "layers.1"].iter("failure")
    assert "layers.1.self_attn" in str(failure.get("message"))
    shown = summary.read_text(encoding="utf-8")
    assert shown.startswith("before\n# FAIL") and "layers.1" in shown
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
    assert "cannot be written" in run("job=compare", "golden=the-golden", "candidate=wrong").out


def test_json_of_a_job_without_a_verdict_is_refused(cli: Callable[..., Ended]) -> None:
    ended = cli("job=doctor", "--json")
    assert ended.exit == 2 and ended.out == ""
    assert ended.err == (
        "layerparity: --json prints a verdict or a list of runs, and job=doctor makes none: "
        "use --quiet, job=compare or job=runs.\n"
    )
    # What was asked of one command is not asked of the next.
    assert cli("--version").out


def test_letters_that_xml_has_not_are_left_out_of_junit() -> None:
    made = every_oddity()
    odd = replace(made.candidate, name="red \x1b[31m, a bell \x07, half a letter \udc80")
    text = render_junit(replace(made, candidate=odd))
    suite = ElementTree.fromstring(text.encode())
    assert "red \ufffd[31m, a bell \ufffd, half a letter \ufffd" in str(suite.get("name"))


def test_what_is_no_number_is_null_to_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with output.taken(["--json"]):
        console.records.append('{"R": NaN, "worst": [Infinity, -Infinity, 1.5]}')
    assert (
        capsys.readouterr().out
        == json.dumps({"R": None, "worst": [None, None, 1.5]}, indent=1) + "\n"
    )


def test_a_summary_that_is_full_is_not_made_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GitHub shows nothing of a summary beyond a MiB, which several comparisons may fill."""
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * ((1 << 20) - 4))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    keep.summarise("\u00e9" * 40 + " http://me:secret@there")
    assert summary.read_bytes()[-5:] == b"x" + "\u00e9\u00e9".encode()
    assert "is full" in capsys.readouterr().out
    keep.summarise("\u00e9 http://me:secret@there")
    assert summary.stat().st_size == 1 << 20
    summary.write_bytes(b"")
    keep.summarise("http://me:secret@there")
    assert summary.read_text(encoding="utf-8") == "http://***@there"


@pytest.mark.parametrize(
    ("words", "to", "exit_"),
    [
        ("job=runs --quiet", ">&-", 0),
        ("--version", ">&-", 0),
        ("--version", ">/dev/full", 2),
        ("job=gc job.older_than=1d", ">/dev/full", 2),
        ("job=plan", ">/dev/full", 2),
    ],
)
def test_a_closed_or_full_output_is_no_failed_comparison(
    tmp_path: Path, words: str, to: str, exit_: int
) -> None:
    """1 is the status of a comparison that fails, and Python's of a traceback."""
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'run.py'))} {words} {to}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == exit_, ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("ours", ["--json", "--quiet"])
def test_help_and_version_are_printed_beside_ours(cli: Callable[..., Ended], ours: str) -> None:
    ended = cli("job=compare", ours, "--help")
    assert ended.exit == 0 and ended.out.startswith("job=compare:")
    assert cli(ours, "--version").out.startswith("layerparity ")


@pytest.mark.parametrize("side", ["golden", "candidate", "job.beside"])
def test_comparing_with_a_folder_that_is_not_there_makes_no_store(
    cli: Callable[..., Ended], tmp_path: Path, side: str
) -> None:
    store = tmp_path / "not-yet"
    ended = cli("job=compare", f"{side}=./nowhere", f"tracking.folder={store}")
    assert ended.exit == 2 and "There is no folder nowhere" in ended.err
    assert not store.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("golden=strange", "candidate=mine"), "strange has neither manifest.json, which a"),
        (("golden=mine", "candidate=strange"), "strange has neither manifest.json, which a"),
        (
            ("golden=mine", "candidate=twin", "job.beside=strange"),
            "strange has neither manifest.json, which a",
        ),
        (("golden=mine", "candidate=other"), "cannot be compared: model (minimax_m2"),
        (("golden=mine",), "There is no finished candidate run to compare"),
        ((), "There are no runs in "),
    ],
)
def test_what_cannot_be_compared_makes_no_store(
    cli: Callable[..., Ended], tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    values = {"norm:out": torch.ones(1, 4, 8)}
    for name in ("mine", "twin"):
        make_run(tmp_path / name, values, stages=("norm",))
    model = replace(MODEL, model_type="other")
    make_run(tmp_path / "other", values, stages=("norm",), model=model)
    (tmp_path / "strange").mkdir()
    before = sorted(tmp_path.iterdir())
    ended = cli("job=compare", *words)
    assert ended.exit == 2 and says in ended.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["latest", "a-name", "0123abcd"])
def test_comparing_by_a_name_makes_no_store(
    cli: Callable[..., Ended], tmp_path: Path, name: str
) -> None:
    store = tmp_path / "not-yet"
    ended = cli("job=compare", f"golden={name}", f"tracking.folder={store}")
    assert ended.exit == 2 and f"There are no runs in {store}: make a golden first" in ended.err
    assert not store.exists()
