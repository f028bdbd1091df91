"""Alignment: what is asked of a candidate, which golden it is held against, and by which floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import MODEL, make_run, sites

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.judge.choose import newest_pair
from layerparity.judge.conclude import paired
from layerparity.judge.references import CHAINED, ISOLATED, feed_of
from layerparity.judge.stages import stage_of
from layerparity.record.manifest import SitePatterns
from layerparity.record.reason import ReasonKind
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Row

BLOCK = "layers.1"
LOST = f"{BLOCK}.mlp:out"


def of_block(layer: int) -> dict[str, torch.Tensor]:
    """Return the tensors of block 1 as those of a block of some number."""
    return {
        site.replace(BLOCK, f"layers.{layer}"): tensor
        for site, tensor in sites().items()
        if site.startswith(BLOCK)
    }


def alone(folder: Path, lacks: str = "", **manifest: object) -> StoredRun:
    """Make a run of block 1, fed the golden's own input, maybe without one of its sites."""
    tensors = {site: tensor for site, tensor in of_block(1).items() if site != lacks}
    return make_run(folder, tensors, stages=[BLOCK], feed="isolated", **manifest)


def settled(golden: StoredRun, candidate: StoredRun) -> dict[str, Row]:
    """Return the rows that no tensor is read for, by site."""
    return {str(row.site): row for row in paired([golden], [candidate])[2].settled}


def test_a_block_is_not_asked_for_the_sites_of_one_whose_number_begins_alike(
    tmp_path: Path,
) -> None:
    tensors = of_block(1) | of_block(10)
    golden = make_run(tmp_path / "g", tensors, stages=["layers.1", "layers.10"], feed="isolated")
    aligned = paired([golden], [alone(tmp_path / "c")])[2]
    assert {pair.site.layer for pair in aligned.pairs} == {1}
    assert aligned.settled == []
    manifest = golden.read_manifest()
    for path, stage in (("layers.10.mlp", "layers.10"), ("layers.1", "layers.1"), ("norm", None)):
        assert stage_of(manifest, Site(path, "out")) == stage


def test_a_site_that_was_asked_for_and_lost_is_missing(tmp_path: Path) -> None:
    golden = alone(tmp_path / "g")
    whole, few = SitePatterns("whole", ("*:*",)), SitePatterns("few", (":in", ":out"))
    for capture in (golden.read_manifest().capture, whole):
        candidate = alone(tmp_path / f"lost-{capture.name}", lacks=LOST, capture=capture)
        row = settled(golden, candidate)[LOST]
        assert (row.outcome, row.why and row.why.kind) == (Outcome.MISSING, ReasonKind.LOST)
    candidate = alone(tmp_path / "few", lacks=LOST, capture=few)
    row = settled(golden, candidate)[LOST]
    assert (row.outcome, row.why and row.why.kind) == (Outcome.SKIPPED, ReasonKind.NOT_ASKED_FOR)


def test_a_golden_of_another_configuration_is_refused_whatever_it_is_called(tmp_path: Path) -> None:
    golden = alone(tmp_path / "g", model=replace(MODEL, config_digest="config-1"))
    with pytest.raises(UserError, match=r"model configuration \(tiny against tiny\)"):
        paired([golden], [alone(tmp_path / "c")])
    renamed = alone(tmp_path / "r", model=replace(MODEL, name="other"))
    assert paired([renamed], [alone(tmp_path / "same")])[2].pairs


def test_the_newest_golden_that_ran_all_of_a_candidate_is_taken(tmp_path: Path) -> None:
    whole, candidate = (
        make_run(tmp_path / name, sites(), feed=feed)
        for name, feed in (("whole", "chained"), ("candidate", "isolated"))
    )
    part = alone(tmp_path / "part")
    assert newest_pair([[part], [whole]], [[candidate]])[0] == [whole]
    assert newest_pair([[part]], [[candidate]])[0] == [part]
    other = make_run(tmp_path / "x", sites(), model=replace(MODEL, config_digest="config-1"))
    found, _, passed_over = newest_pair([[other], [whole]], [[candidate]])
    assert found == [whole]
    assert [each.golden for each in passed_over] == [[other]]


@pytest.mark.parametrize(("fed", "feed"), [("same", ISOLATED), ("other", CHAINED)])
def test_the_floor_of_a_block_alone_is_for_one_fed_what_the_golden_had(
    tmp_path: Path, fed: str, feed: str
) -> None:
    values = sites()[f"{BLOCK}:in"] + (fed == "other")
    golden = alone(tmp_path / "g").read_manifest()
    tensors = of_block(1) | {f"{BLOCK}:in": values}
    candidate = make_run(tmp_path / "c", tensors, stages=[BLOCK], feed="isolated")
    assert feed_of(candidate.read_manifest(), golden, BLOCK, Site(BLOCK, "out")) == feed
