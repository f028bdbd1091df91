"""The skill for coding agents: its keys are a verdict's; its commands are tested with the docs'."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from conftest import ROOT, Ended

from layerparity.ground.errors import Exit
from layerparity.record.verdict import Outcome

SKILL = ROOT / "skills" / "layerparity" / "SKILL.md"


def section(title: str) -> str:
    text = SKILL.read_text(encoding="utf-8")
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_front_matter_names_the_skill_after_its_folder() -> None:
    front = SKILL.read_text(encoding="utf-8").split("---\n")[1]
    keys = dict(line.split(": ", 1) for line in front.splitlines())
    assert set(keys) == {"name", "description"} and keys["name"] == SKILL.parent.name
    assert 0 < len(keys["description"]) <= 1024


def test_its_exit_statuses_are_those_of_commands() -> None:
    said = re.findall(r"(?:^|; |\n)(\d) ", section("Exit status"))
    assert [int(each) for each in said] == [int(each) for each in Exit]


def test_its_keys_are_those_of_a_verdict(run: Callable[..., Ended]) -> None:
    port = ("port=fault", "port.name=qk_norm_per_head", "name=wrong")
    shared = ("device_map=cpu", "kind=candidate", "scope=single", "layer=1", "inputs=golden")
    assert run(*shared, *port, "golden=the-golden").exit == Exit.OK
    ended = run("job=compare", "golden=the-golden", "candidate=wrong", "--json")
    assert ended.exit == Exit.FAILED, ended.err
    verdict = json.loads(ended.out)
    said = set(re.findall(r"`([a-z_]+)`", section("Read verdict.json")))
    inside = set(verdict["rows"][0]) | set(verdict["causes"][0])
    assert said - {each.value for each in Outcome} <= set(verdict) | inside
    assert {"confidence", "metrics", "breaches", "outcome", "where"} <= said
