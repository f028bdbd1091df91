"""Adding is a file or two: each thing that can be added is, to a copy of the code, and then used.

Tests and rows in the docs come on top. CONTRIBUTING.md says what each file holds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT
from folders import _save
from test_families import DENSE
from transformers import AutoConfig

from layerparity.anatomy.site import Site
from layerparity.record.folder import MANIFEST, RunFolder
from layerparity.record.manifest import Manifest
from layerparity.record.verdict import FILE_NAME, Row, Verdict

PACKAGE = "src/layerparity"
MOST = 2


@dataclass(frozen=True)
class Addition:
    """Files that are new, by path; and in files that are there, what a place is replaced by."""

    files: dict[str, str]
    edits: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def put(self, root: Path) -> None:
        for path, text in self.files.items():
            assert not (root / path).exists(), path
            (root / path).write_text(text, encoding="utf-8")
        for path, places in self.edits.items():
            text = (root / path).read_text(encoding="utf-8")
            for pattern, replacement in places:
                text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
                assert count == 1, f"{path} has no such place: look at CONTRIBUTING.md: {pattern}"
            (root / path).write_text(text, encoding="utf-8")


FAMILY = '''"""GPT-NeoX: attention and MLP side by side, each behind a norm of its own."""

from layerparity.anatomy.block import RESIDUAL, Block, Node
from layerparity.anatomy.family import Family, Tap

FAMILY = Family(
    "gpt_neox",
    taps=(
        Tap("input_layernorm:out", "input_layernorm"),
        Tap("self_attn.qkv_proj:out", "attention.query_key_value"),
        Tap("self_attn:out", "attention", pick=0),
        Tap("post_attention_layernorm:out", "post_attention_layernorm"),
        Tap("mlp:out", "mlp"),
    ),
    block=Block(
        (
            Node("input_layernorm:out", (":in",), "input_layernorm"),
            Node("self_attn.qkv_proj:out", ("input_layernorm:out",), "attention.query_key_value"),
            Node("self_attn:out", ("self_attn.qkv_proj:out",), "attention"),
            Node("post_attention_layernorm:out", (":in",), "post_attention_layernorm"),
            Node("mlp:out", ("post_attention_layernorm:out",), "mlp"),
            Node(":out", (":in", "self_attn:out", "mlp:out"), "", RESIDUAL),
        )
    ),
)
'''
METRIC = '''"""Signs: how many elements have the other sign."""

from dataclasses import dataclass

from layerparity.anatomy.site import Kind


@dataclass(frozen=True)
class OtherSign:
    """Share of the elements whose sign differs."""

    kinds: tuple[Kind, ...] = (Kind.REAL,)

    def start(self):
        return 0, 0

    def update(self, state, chunk):
        differ = int((chunk.golden.sign() != chunk.candidate.sign()).sum())
        return state[0] + differ, state[1] + chunk.size

    def compute(self, state):
        return state[0] / state[1] if state[1] else float("nan")


METRICS = {"other_sign": OtherSign()}
'''
LABEL = '    Measure("other_sign", "other sign", "Share of the elements whose sign differs."),'
CAUSE = '''"""The MLP is subtracted from the residual stream."""

from layerparity.mistakes.block import lacking
from layerparity.mistakes.cause import Cause
from layerparity.mistakes.fault import Fault


def plant(block, surgery):
    def negative(exact):
        return lambda *args, **named: -exact(*args, **named)

    surgery.wrap(block.get_submodule("mlp"), negative)


FAULT = Fault(
    "mlp_subtracted",
    "the MLP is subtracted, not added",
    component="mlp",
    cause="mlp_subtracted",
    why_not=lambda block, dtype, phase: lacking(block, "mlp"),
    plant=plant,
)


class Subtracted:
    def judge(self, evidence):
        slope = evidence.metric("slope")
        if evidence.local != "mlp:out" or slope is None or abs(slope + 2) > 0.01:
            return None
        text = "the MLP has the other sign: it is subtracted from the residual stream"
        return Cause("mlp_subtracted", text, [f"the slope of the error is {slope:.3f}"])


RULE = Subtracted()
'''
CHECK = '''"""Check whether the clock of this machine was ever set."""

import time

from layerparity.doctor.base import Check, Section, ok, problem


def check_clock(config):
    year = time.gmtime().tm_year
    if year < 2024:
        yield problem("almanac", f"the year is {year}", "set the clock")
    else:
        yield ok("almanac", f"the year is {year}")


CHECKS = (Check("almanac", Section.MACHINE, check_clock),)
'''
JOB = '''"""Greet: say which model a command is about."""

from dataclasses import dataclass

from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.settings.key import key


@dataclass
class Settings:
    """conf/job/greet.yaml."""

    name: str = "greet"
    word: str = key("hello", "what is said to the model")


def run(config):
    console.say(f"{config.job.word}, {config.model.name}")
    return Exit.OK
'''
YAML = """# Say which model a command is about.
# heading: prepare
defaults:
  - /schema/job@_here_: greet
  - _self_
name: greet
"""
FIGURE = '''"""Figure: how far the worst element of the guilty site is off."""

from layerparity.report.svg import canvas, text


def far_off(portrait):
    """Return the figure, or nothing where no element is known."""
    if not portrait.worst:
        return ""
    words = f"{portrait.worst[0].error:.3g}"
    drawn = text(9.0, 24.0, words)
    return canvas(200.0, 40.0, "The element that is farthest off", f"Off by {words}.", drawn)
'''
IMPORT = r"from layerparity.report.far_off import far_off\n\g<0>"
# An anchor, a name in the navigation, a title, words and the figure.
ENTRY = (
    r'\g<0>\n        Figure("far", "Farthest", "Farthest element", "How far it is off.", '
    r"far_off(verdict.portrait) if verdict.portrait else ''),"
)

ADDITIONS = {
    "family": Addition({f"{PACKAGE}/anatomy/families/gpt_neox.py": FAMILY}),
    "metric": Addition(
        {f"{PACKAGE}/numbers/metrics/signs.py": METRIC},
        {f"{PACKAGE}/report/measures.py": ((r"^MEASURES = \($", rf"\g<0>\n{LABEL}"),)},
    ),
    "cause": Addition({f"{PACKAGE}/mistakes/known/mlp_subtracted.py": CAUSE}),
    "check": Addition({f"{PACKAGE}/doctor/almanac.py": CHECK}),
    "job": Addition({f"{PACKAGE}/jobs/greet.py": JOB, "conf/job/greet.yaml": YAML}),
    "figure": Addition(
        {f"{PACKAGE}/report/far_off.py": FIGURE},
        {
            f"{PACKAGE}/report/html.py": (
                (r"^from layerparity\.report\.svg import", IMPORT),
                (r"metric_heatmap\(columns, verdict\.limits\),\s*\),", ENTRY),
            )
        },
    ),
}
EXPERIMENT = """# @package _global_
# Does what was added work?
defaults:
  - override /job: sequence
job:
  steps:
    - job=greet job.word=welcome
    - backend=gpu device_map=cpu inputs=random seq_len=24 reference.chained=false \
reference.dtypes=[float32] name=the-golden
    - backend=gpu device_map=cpu kind=candidate port=fault port.name=mlp_subtracted \
port.layers=[1] golden=the-golden name=the-candidate
    - job=compare golden=the-golden candidate=the-candidate
"""


@dataclass(frozen=True)
class Commands:
    """The code with everything added, and commands of it."""

    root: Path

    def run(self, *words: str) -> tuple[int, str]:
        """Run a command of the copy in a process of its own; return its status and all it said."""
        paths = {"PYTHONPATH": str(self.root / "src"), "COLUMNS": "200"}
        program = [sys.executable, "-m", "layerparity", *words]
        ended = subprocess.run(
            program,
            cwd=self.root / "work",
            env={**os.environ, **paths},
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    root = tmp_path_factory.mktemp("adding")
    for folder in (PACKAGE, "conf"):
        shutil.copytree(ROOT / folder, root / folder)
    for name in ("experiments", "checkpoints", "constraints.txt", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    for addition in ADDITIONS.values():
        addition.put(root)
    (root / "work" / "experiments").mkdir(parents=True)
    (root / "work" / "experiments" / "adding.yaml").write_text(EXPERIMENT)
    return Commands(root)


@dataclass(frozen=True)
class Compared:
    """What the one pair of runs and its comparison said and kept."""

    said: str
    golden: Manifest
    verdict: Verdict
    page: str

    def row(self, site: str) -> Row:
        return next(row for row in self.verdict.rows if row.site == Site.parse(site))


@pytest.fixture(scope="module")
def compared(commands: Commands) -> Compared:
    config = AutoConfig.for_model("gpt_neox", **{**DENSE, "num_hidden_layers": 2})
    model = _save(config, commands.root / "model", 0)
    status, said = commands.run("experiment=adding", "model=checkpoint", f"model.path={model}")
    assert status == 1, said
    store = commands.root / "work" / "mlruns"
    manifests = [RunFolder(path.parent).read_manifest() for path in store.rglob(MANIFEST)]
    (golden,) = (each for each in manifests if each.kind == "golden")
    (verdict,) = store.rglob(FILE_NAME)
    page = (verdict.parent / "report.html").read_text(encoding="utf-8")
    return Compared(said, golden, Verdict.from_json(verdict.read_text()), page)


@pytest.mark.parametrize("what", ADDITIONS)
def test_it_takes_two_files_at_most(what: str) -> None:
    addition = ADDITIONS[what]
    assert 1 <= len({*addition.files, *addition.edits}) <= MOST


def test_a_family_is_observed_by_the_names_of_its_file(compared: Compared) -> None:
    assert compared.golden.model.model_type == "gpt_neox"
    shown = {str(record.site) for record in compared.golden.records}
    assert {"layers.1.self_attn:out", "layers.1.mlp:out"} <= shown
    assert not any(".attention:" in site for site in shown)


def test_a_metric_is_measured_stored_and_in_the_report(compared: Compared) -> None:
    assert compared.row("layers.1.mlp:out").metrics["other_sign"] == pytest.approx(1)
    assert compared.row("layers.1.self_attn:out").metrics["other_sign"] == 0
    assert '<th scope="col" class="number">other sign</th>' in compared.page


def test_a_cause_is_planted_and_named(compared: Compared) -> None:
    assert "FAIL at layers.1.mlp:out" in compared.said
    assert "(not measured): the MLP has the other sign" in compared.said
    assert compared.verdict.causes[0].id == "mlp_subtracted"


def test_a_figure_is_in_the_report(compared: Compared) -> None:
    portrait = compared.verdict.portrait
    assert portrait is not None
    off = f"Off by {portrait.worst[0].error:.3g}."
    assert f'aria-label="The element that is farthest off. {off}"' in compared.page
    assert '<h2 id="far">Farthest element</h2>' in compared.page


def test_a_job_is_in_the_help_and_runs(commands: Commands, compared: Compared) -> None:
    status, said = commands.run("--help")
    assert status == 0
    assert re.search(r"^  greet +Say which model a command is about\.$", said, re.MULTILINE)
    assert "welcome, checkpoint" in compared.said


def test_a_check_is_a_line_of_the_table(commands: Commands) -> None:
    # Those that import torch in children of their own take half a minute, and say nothing of it.
    for path in (commands.root / PACKAGE / "doctor").glob("*.py"):
        if path.stem not in ("__init__", "base", "machine", "almanac"):
            path.unlink()
    status, said = commands.run("job=doctor")
    assert status == 0, said
    assert " in 3 lines" in said
    assert re.search(r"│ almanac +│ ok +│ the year is 20\d\d +│", said), said


def test_nothing_of_it_is_there_without_the_files() -> None:
    names = re.compile("gpt_neox|other_sign|mlp_subtracted|almanac|greet|far_off")
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    assert [path for path in files if names.search(path.read_text(encoding="utf-8"))] == []
