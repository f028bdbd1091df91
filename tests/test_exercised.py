"""Exercised: an expert that no token reached counts by its weights, where both sides tell them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import make_run, sites

from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record.findings import Doubt, DoubtKind, ExpertUse
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import WeightPrint
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict

BLOCK, EXPERTS = "layers.1", 4
# Every token goes to the experts 0 and 2.
UNUSED = (1, 3)


def side(folder: Path, digests: str) -> StoredRun:
    """Make a run of one block, whose port tells a digest, a letter each, of its first experts."""
    tensors = {site: each for site, each in sites().items() if site.startswith(BLOCK)}
    held = {
        f"model.{BLOCK}.mlp.experts.{n}.w1": WeightPrint((4,), "float32", d, checkpoint="equal")
        for n, d in enumerate(digests)
    }
    files = RunFolder(folder)
    folder.mkdir()
    run = make_run(folder, tensors, stages=[BLOCK], feed="isolated", layer_experts={1: EXPERTS})
    manifest = run.read_manifest()
    files.write_effective_weights({BLOCK: held})
    files.write_used_weights({BLOCK: dict.fromkeys(held, "1")} if held else {BLOCK: {"w": "1"}})
    files.write_manifest(manifest)
    return run


def compared(folder: Path, golden: str, candidate: str) -> tuple[Verdict, ExpertUse]:
    runs = side(folder / "g", golden), side(folder / "c", candidate)
    verdict = conclude(runs[:1], runs[1:], FixedTolerance())
    assert {row.outcome for row in verdict.rows} == {Outcome.PASS}
    (use,) = verdict.coverage.experts
    assert use.unused == UNUSED
    return verdict, use


@pytest.mark.parametrize(
    ("golden", "candidate", "never"),
    [
        ("abcd", "abcd", ()),
        ("", "", UNUSED),
        ("abcd", "", UNUSED),
        ("", "abcd", UNUSED),
        ("abc", "abc", (3,)),
    ],
)
def test_an_expert_that_no_token_reached_is_a_doubt_unless_its_weights_are_known_and_the_same(
    tmp_path: Path, golden: str, candidate: str, never: tuple[int, ...]
) -> None:
    verdict, use = compared(tmp_path, golden, candidate)
    assert use.never == never
    doubts = [Doubt(DoubtKind.EXPERTS, {"layer": 1, "experts": list(never)})] if never else []
    assert list(verdict.coverage.doubts) == doubts
    assert verdict.outcome is (Outcome.INCONCLUSIVE if never else Outcome.PASS)


def test_a_token_of_padding_exercises_no_expert(tmp_path: Path) -> None:
    tensors = {site: each for site, each in sites().items() if site.startswith(BLOCK)}
    choices = tensors[f"{BLOCK}.mlp.gate:choices"].clone()
    choices[0, 0] = torch.tensor([1, 3])
    tensors[f"{BLOCK}.mlp.gate:choices"] = choices
    mask = torch.ones(2, 5)
    for first, unused in ((1, ()), (0, UNUSED)):
        mask[0, 0] = first
        runs = [
            make_run(
                tmp_path / f"{name}{first}",
                tensors,
                stages=[BLOCK],
                feed="isolated",
                mask=mask,
                layer_experts={1: EXPERTS},
            )
            for name in ("g", "c")
        ]
        verdict = conclude(runs[:1], runs[1:], FixedTolerance())
        assert [use.unused for use in verdict.coverage.experts] == [unused]
