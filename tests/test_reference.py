"""What a golden computes beside itself: the short ways give what the long ones do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Ended
from test_calibrated import folder_of
from test_resume import save_random

from layerparity.anatomy.site import Site
from layerparity.making import reference
from layerparity.making.evaluate import Evaluator
from layerparity.making.reference import ReferenceRecorder
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.record.folder import RunFolder
from layerparity.record.references import (
    CHAINED,
    ISOLATED,
    ReferenceEntry,
    StoredReferences,
)

Cli = Callable[..., Ended]
Made = Callable[[str], Path]
Golden = Callable[[str], StoredReferences]
HERE = ("backend=gpu", "device_map=cpu", "threads=1", "capture=components")
PROMPT = (5, 6, 7, 8, 9, 10)


@pytest.fixture
def steps(cli: Cli, tmp_path: Path, two_blocks: Path) -> Callable[[str], StoredReferences]:
    """Return what makes a golden of five decode steps, and gives its references."""

    def model(name: str) -> Path:
        if name != "gpt_oss":
            return two_blocks
        # Every other block sees a window of four tokens, which the prompt fills.
        folder = tmp_path / "model"
        if not folder.exists():
            shutil.copytree(ROOT / "tests/masters/models/gpt_oss", folder)
            config = json.loads((folder / "config.json").read_text())
            few = {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
            few |= {"sliding_window": 4}
            (folder / "config.json").write_text(json.dumps({**config, **few}))
            save_random(folder)
        return folder

    def golden(name: str) -> StoredReferences:
        (tmp_path / "tokens.json").write_text(json.dumps([PROMPT]))
        words = (
            *HERE, "model=checkpoint", f"model.path={model(name)}", "inputs=tokens",
            "inputs.file=tokens.json", "generate.max_new_tokens=6", "reference.chained=false",
            "reference.components=false",
        )  # fmt: skip
        # What is never evaluated together is the same in every floating type.
        ended = cli(*words, *(["reference.dtypes=[float32]"] if name == "gpt_oss" else []))
        assert ended.exit == 0, ended.err
        return references(tmp_path)

    return golden


def references(tmp_path: Path) -> StoredReferences:
    folder = folder_of(tmp_path, "golden")
    return StoredReferences(RunFolder(folder), RunFolder(folder).read_manifest().reference)


# The sites of what experts add to.
BEHIND_EXPERTS = ("mlp.experts:out", "mlp:out", ":out")


@pytest.mark.parametrize(("name", "together"), [("minimax_m2", True), ("gpt_oss", False)])
def test_steps_together_are_what_each_is_alone(
    steps: Golden, name: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three and two of them, digit by digit; where windows move on, each is evaluated alone."""
    evaluated: list[tuple[str, int]] = []
    evaluate = Evaluator.evaluate

    def counted(self, stage, given, *rest):
        evaluated.append((stage, given.shape[1]))
        return evaluate(self, stage, given, *rest)

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    monkeypatch.setattr(reference, "TOGETHER", 1)
    alone = steps(name)
    assert {tokens for stage, tokens in evaluated if stage == "layers.1"} == {1, len(PROMPT)}
    monkeypatch.setattr(reference, "TOGETHER", 3)
    evaluated.clear()
    joined = steps(name)
    sizes = {2, 3} if together else {1}
    assert {tokens for stage, tokens in evaluated if stage == "layers.1"} == {*sizes, len(PROMPT)}
    found, entries = at_each_site(joined), at_each_site(alone)
    assert set(found) == set(entries)
    assert (len(joined.entries()) < len(found)) is together
    assert {site.step for _, site in entries if site.phase == "decode"} == {1, 2, 3, 4, 5}
    for key, entry in entries.items():
        wide = joined.reference(found[key]), alone.reference(entry)
        largest = float(wide[1].abs().max())
        torch.testing.assert_close(*wide, rtol=0, atol=1e-13 * largest, msg=str(key[1]))
        for dtype in entry.floors:
            floor, own = joined.floor(found[key], dtype), alone.floor(entry, dtype)
            assert floor is not None and own is not None and floor.ways == own.ways
            # torch multiplies grouped rows as it likes: alone they are another operation.
            grouped = entry.site.local in BEHIND_EXPERTS
            for index, way in enumerate(own.ways):
                digits = 0.5 if grouped and way == "perturbed" else 1e-12
                for one, other in ((floor.tokens, own.tokens), (floor.elements, own.elements)):
                    left, right = one[index].sum(), other[index].sum()
                    torch.testing.assert_close(left, right, rtol=digits, atol=0)
                    if digits < 0.5:
                        torch.testing.assert_close(one[index], other[index], rtol=digits, atol=0)
            # Of few tokens there are none.
            assert floor.weighed is own.weighed is None and floor.factors == own.factors == {}
            several = [alone.find(entry.stage, ISOLATED, site) for site in found[key].sites]
            for grouping, slope in floor.slopes.items():
                each = [one.floors[dtype].slopes[grouping] for one in several if one is not None]
                pooled = SlopeSample.pooled(each)
                digits = 0.5 if grouped else 1e-9
                assert astuple(slope) == pytest.approx(astuple(pooled), rel=digits)


def at_each_site(stored: StoredReferences) -> dict[tuple[str, Site], ReferenceEntry]:
    found = {
        (entry.stage, site): stored.find(entry.stage, entry.feed, site)
        for entry in stored.entries()
        for site in entry.sites
    }
    return {key: entry for key, entry in found.items() if entry is not None}


def test_rotary_tables_that_grow_are_not_shared_by_steps() -> None:
    port = SimpleNamespace(skeleton=SimpleNamespace(config=SimpleNamespace()))
    for rope, grows in (
        ({"rope_type": "default"}, False),
        ({"rope_type": "yarn"}, False),
        ({"rope_type": "longrope"}, True),
        ({"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}, True),
        (None, False),
    ):
        port.skeleton.config.rope_parameters = rope
        assert reference._tables_grow(port.skeleton.config) is grows


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that were evaluated, once for each way."""
    seen: list[str] = []
    evaluate = Evaluator.evaluate

    def counted(self, stage, *rest, **named):
        seen.append(stage)
        return evaluate(self, stage, *rest, **named)

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    return seen


def test_the_begin_of_a_chain_is_evaluated_once(
    cli: Cli,
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluated: list[str],
) -> None:
    """What it would be by itself is what the isolated evaluation gave, and is stored as both."""
    (tmp_path / "tokens.json").write_text(json.dumps([PROMPT]))
    words = (
        *HERE, "model=checkpoint", f"model.path={made('minimax_m2')}", "inputs=tokens",
        "inputs.file=tokens.json", "reference.components=false", "reference.dtypes=[float32]",
    )  # fmt: skip
    assert cli(*words).exit == 0
    once = references(tmp_path)
    assert evaluated.count("layers.0") * 2 == evaluated.count("layers.1") == 8
    begin = ReferenceRecorder.begin

    def as_with_a_cache(self, *arguments):
        begin(self, *arguments)
        self._cached = True

    monkeypatch.setattr(ReferenceRecorder, "begin", as_with_a_cache)
    evaluated.clear()
    assert cli(*words, "name=twice").exit == 0
    assert evaluated.count("layers.0") == evaluated.count("layers.1") == 8
    twice = references(tmp_path)
    assert {e.feed for e in once.entries()} == {ISOLATED, CHAINED}
    assert [e.hashes for e in once.entries()] == [e.hashes for e in twice.entries()]


def test_blocks_that_are_fed_from_elsewhere_are_no_chain(cli: Cli, evaluated: list[str]) -> None:
    words = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0", "inputs=random")
    assert cli(*words, "seq_len=6", "reference.dtypes=[float32]").exit == 0
    assert evaluated.count("layers.0") == 4
