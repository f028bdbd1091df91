"""What a release says of itself agrees with the code: version, changelog, extras, workflow."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from conftest import ROOT

import layerparity

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_changelog_has_a_section_of_this_version_in_the_usual_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert versions[:2] == ["Unreleased", layerparity.__version__]
    links = re.findall(r"^\[(.+?)\]: https://", text, re.M)
    assert sorted(links) == sorted(versions)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= kinds
    first = text.partition(f"## [{layerparity.__version__}]")[2].partition("\n## ")[0]
    assert len(first.splitlines()) <= 60


def test_who_cites_it_cites_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == layerparity.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == PROJECT["urls"]["Homepage"]


def test_the_pythons_are_those_that_make_looks_for() -> None:
    told = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    asked = re.findall(r"for each in ((?:python3\.\d+ ?)+)", (ROOT / "Makefile").read_text())[0]
    assert {f"python{each}" for each in told} == set(asked.split())


@pytest.mark.parametrize("package", ["torch-neuronx", "neuronx-distributed"])
def test_what_aws_alone_gives_is_an_extra_and_pinned_nowhere(package: str) -> None:
    assert any(each.startswith(package) for each in PROJECT["optional-dependencies"]["neuron"])
    assert package not in (ROOT / "constraints.txt").read_text()


def test_the_workflow_runs_what_everybody_runs() -> None:
    told = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = told["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
