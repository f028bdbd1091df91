"""The table of public NxDI sources: what counts as the expected end of a case."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nxd_signatures
import pytest
from conftest import ROOT
from nxdi_models import CONTRIB, FORK, MODELS
from nxdi_sources import APPLICATIONS, CASES, CHECKPOINTS, DEGREES, Case, Found, make_checkpoint

RIGHT = Case(FORK, "llama", 2)
WRONG = Case(FORK, "minimax_m2", 2, where="layers.0.self_attn.q_norm")
REFUSED = Case(FORK, "minimax_m2", 1, refused="q_proj.weight")


@pytest.mark.parametrize(
    ("case", "found", "expected"),
    [
        (RIGHT, Found("9", "pass"), True),
        (RIGHT, Found("9", "inconclusive"), False),
        (RIGHT, Found("9", "fail", "layers.0.mlp:out"), False),
        (RIGHT, Found("-", "refused", "no such folder"), False),
        (WRONG, Found("9", "fail", "layers.0.self_attn.q_norm:out"), True),
        (WRONG, Found("9", "fail", "layers.0.mlp:out"), False),
        (WRONG, Found("9", "pass"), False),
        (REFUSED, Found("-", "refused", "it wants 'layers.0.self_attn.q_proj.weight'"), True),
        (REFUSED, Found("-", "refused", "no such folder"), False),
        (REFUSED, Found("9", "pass"), False),
    ],
)
def test_a_case_ends_as_expected_or_not(case: Case, found: Found, expected: bool) -> None:
    assert found.as_expected(case) is expected


def test_each_case_has_a_name_of_its_own_a_checkpoint_and_an_application() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    listed = {(each.source, each.name) for each in MODELS}
    assert len(listed) == len(MODELS)
    others = [case for case in CASES if (case.source, case.model) not in listed]
    assert {case.model for case in others} == set(CHECKPOINTS)
    assert {(case.source, case.model) for case in others} == set(APPLICATIONS)


def test_each_model_is_run_at_three_degrees_in_two_types_and_most_are_right() -> None:
    for model in MODELS:
        own = [case for case in CASES if (case.source, case.model) == (model.source, model.name)]
        ways = {(case.degree, case.dtype) for case in own}
        assert len(own) == len(ways) == 6
        assert not [case for case in own if case.where and case.refused]
    contributed = [each for each in MODELS if each.source == CONTRIB]
    wrong = [each for each in contributed if each.where or each.rounded or each.refused]
    assert len(contributed) - len(wrong) >= 15


def test_a_model_may_go_wrong_elsewhere_in_bfloat16() -> None:
    own = {case.dtype: case.where for case in CASES if case.model == "gemma-2-9b"}
    assert own == {"float32": "layers.0.self_attn:context", "bfloat16": "embed_tokens:out"}
    own = {(case.degree, case.where) for case in CASES if case.model == "Phi-3-mini-4k-instruct"}
    assert own == {(1, ""), (2, "layers.0.mlp"), (4, "layers.0.mlp")}


def test_a_model_that_cannot_be_run_at_some_degrees_may_be_wrong_at_the_others() -> None:
    own = {(c.degree, c.where, bool(c.refused)) for c in CASES if c.model == "OLMo-3-7B-Think"}
    assert own == {(1, "layers.3.self_attn:context", False), (2, "", True), (4, "", True)}
    own = {(c.degree, c.where, bool(c.refused)) for c in CASES if c.model == "EXAONE-4.0-1.2B"}
    assert own == {(1, "", True), (2, "", True), (4, "", True)}


def test_a_model_is_made_in_the_sizes_of_the_table(tmp_path: Path) -> None:
    case = next(each for each in CASES if each.model == "phi-1_5")
    make_checkpoint(case, tmp_path / "phi")
    config = json.loads((tmp_path / "phi" / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["vocab_size"]) == ("phi", 96, 320)


@pytest.mark.parametrize(
    ("source", "model"), [each for each in APPLICATIONS if "fp8" not in each[1]]
)
def test_every_model_is_run_at_every_degree(source: str, model: str) -> None:
    plain = [case for case in CASES if (case.source, case.model) == (source, model)]
    degrees = {case.degree for case in plain if (case.dtype, case.neuron) == ("float32", "")}
    assert degrees == set(DEGREES)


def test_without_sources_it_says_that_it_ran_no_case() -> None:
    words = [sys.executable, str(ROOT / "tools" / "nxdi_sources.py")]
    words += ["--nxd", str(nxd_signatures.STAND_IN)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "0 of 0 cases end as the table says.\n")
    assert ended.stderr == ""


def test_a_signature_that_changed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NxD's sources are not here, so the stand-in's own stand for them, and one is changed."""
    source = tmp_path / "neuronx_distributed"
    shutil.copytree(nxd_signatures.STAND_IN / "neuronx_distributed", source)
    model = source / "trace/nxd_model"
    (model / "__init__.py").rename(model / "nxd_model.py")
    assert nxd_signatures.main([str(tmp_path)]) == 0
    file = source / "trace/model_builder_v2.py"
    file.write_text(file.read_text().replace("max_workers: int", "workers: int"))
    assert nxd_signatures.main([str(tmp_path)]) == 1
    assert "! ModelBuilder.compile" in capsys.readouterr().out
