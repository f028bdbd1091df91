"""Alignment: what is asked of a candidate, which golden it is held against, and by which floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import MODEL, make_run, sites

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.choose import newest_pair
from layerparity.judge.conclude import conclude, paired
from layerparity.judge.references import CHAINED, ISOLATED, feed_of
from layerparity.judge.stages import stage_of
from layerparity.judge.tolerances.fixed import FixedTolerance
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


def test_what_one_side_lacks_is_told_by_looking_at_each_record_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dump most sites are lacking: nothing looks at every record for each of them."""
    looks = 0
    whole = Site.pass_step.fget
    assert whole is not None

    def counted(site: Site) -> tuple[str, int]:
        nonlocal looks
        looks += 1
        return whole(site)

    monkeypatch.setattr(Site, "pass_step", property(counted))
    more = SitePatterns("whole", ("*:*",))
    spent = []
    for count in (50, 200):
        names = [f"{BLOCK}.mlp.{number:03}:out" for number in range(count)]
        tensors = {name: torch.ones(1, 2, 4) for name in names} | of_block(1)
        golden = make_run(tmp_path / f"g{count}", tensors, stages=[BLOCK], feed="isolated")
        few = {name: each for name, each in tensors.items() if name not in names[count // 2 :]}
        own = {"stages": [BLOCK], "feed": "isolated", "capture": more}
        candidate = make_run(tmp_path / f"c{count}", few, **own)
        looks = 0
        assert len(settled(golden, candidate)) == count // 2
        spent.append(looks)
    assert 0 < spent[1] < 5 * spent[0]


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


def _real_embedding(run: StoredRun) -> StoredRun:
    """Let a run say that its embedding computes: a scaled one is no copy of rows."""
    manifest = run.files.read_manifest()
    embedded = Site("embed_tokens", "out")
    for at, record in enumerate(manifest.records):
        if record.site == embedded:
            manifest.records[at] = replace(record, kind=Kind.REAL)
    run.files.write_manifest(manifest)
    return run


@pytest.mark.parametrize(("port", "real"), [("mine", True), ("mine", False), ("hf", True)])
def test_transformers_word_on_how_an_embedding_is_made_counts(
    tmp_path: Path, port: str, real: bool
) -> None:
    """A port has no word for a scaled embedding; its rounding is judged, or its rows are exact."""
    off = sites()["embed_tokens:out"] * (1 + 2**-20)
    golden = make_run(tmp_path / "golden", sites())
    candidate = make_run(
        tmp_path / "candidate",
        sites() | dict.fromkeys(("embed_tokens:out", "layers.0:in"), off),
        port="mine",
    )
    _real_embedding(golden if real else candidate)
    sides = (golden, candidate) if port == "mine" else (candidate, golden)
    verdict = conclude([sides[0]], [sides[1]], FixedTolerance())
    rows = {str(row.site): row.outcome for row in verdict.rows}
    assert rows["embed_tokens:out"] is (Outcome.PASS if real else Outcome.FAIL)
    assert rows["layers.0:in"] is rows["embed_tokens:out"]


@pytest.mark.parametrize("port", ["mine", "hf"])
@pytest.mark.parametrize(("family", "local"), [("gemma2", "act_fn"), ("minimax_m2", "gate")])
def test_what_was_measured_beside_a_familys_table_a_port_need_not_show(
    tmp_path: Path, port: str, family: str, local: str
) -> None:
    """A site of the table that is lost without a reason is missing, and so is one of port=hf."""
    model = replace(MODEL, model_type=family)
    site = f"layers.1.mlp.{local}:out"
    golden = make_run(tmp_path / "golden", sites() | {site: torch.randn(2, 5, 8)}, model=model)
    row = settled(golden, make_run(tmp_path / "run", sites(), port=port, model=model))[site]
    free = (family, port) == ("gemma2", "mine")
    assert row.outcome is (Outcome.SKIPPED if free else Outcome.MISSING)
    # It shows it elsewhere.
    elsewhere = sites() | {site.replace("1", "0"): torch.randn(2, 5, 8)}
    row = settled(golden, make_run(tmp_path / "other", elsewhere, port=port, model=model))[site]
    assert row.outcome is Outcome.MISSING
    golden = make_run(tmp_path / "again", sites(), model=model)
    lost = {text: each for text, each in sites().items() if text != "layers.1.mlp:out"}
    row = settled(golden, make_run(tmp_path / "lost", lost, port=port, model=model))[
        "layers.1.mlp:out"
    ]
    assert row.outcome is Outcome.MISSING
