"""The guilty site close up: numbers gathered from tensors, and what a reader sees of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Ended
from report_samples import CASES, calibrated, html_of
from test_report import words_of

from layerparity.anatomy.site import Kind, Place, Site
from layerparity.judge.closeup import (
    CloseUp,
    Sides,
    choose_close_up,
    quantiles,
    sigma,
    spacing,
    ulp_histogram,
    worst_elements,
)
from layerparity.judge.portraits import MOST_GROUPS
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.numbers.deviation import JudgedSite
from layerparity.numbers.floor import Floor
from layerparity.numbers.token_sums import TokenLayout
from layerparity.record.guilt import Guilt
from layerparity.record.portrait import (
    FLOOR,
    GOLDEN,
    ULP_EDGES,
    Instead,
    InsteadKind,
    Portrait,
)
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.answer import Answer, answer_of
from layerparity.report.closeup import instead_text, worst_rows
from layerparity.report.markdown import render_markdown
from layerparity.report.measures import compared, present, which

GUILTY = CASES["calibrated"]
CHAINED = CASES["calibrated chained"]


def test_spacing_is_that_of_the_dtype() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, -4.0, 0.0, 3e-39], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float32):
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        wanted = [info.eps, info.eps, 2 * info.eps, 4 * info.eps, least, least]
        assert spacing(values, dtype).tolist() == wanted


def test_ulp_histogram_counts_every_element_once_by_its_distance() -> None:
    right = torch.ones(1, 6, dtype=torch.float64)
    step = torch.finfo(torch.bfloat16).eps
    off = torch.tensor([[0.0, 0.1, 1.0, 3.0, 1e30, math.nan]], dtype=torch.float64)
    counts = ulp_histogram(right + step * off, right, torch.bfloat16)
    assert sum(counts) == 6
    assert counts[0] == 1
    assert counts[ULP_EDGES.index(0.125)] == 1
    assert counts[ULP_EDGES.index(1.0)] == 1
    assert counts[ULP_EDGES.index(4.0)] == 1
    assert counts[-1] == 2


def test_quantiles_of_normal_errors_are_the_normal_ones_and_show_a_factor() -> None:
    torch.manual_seed(0)
    reference = torch.zeros(400, 50, dtype=torch.float64)
    error = torch.randn(400, 50, dtype=torch.float64)
    found = quantiles(Sides(error, 3 * error, reference), torch.ones(400, 50, dtype=torch.float64))
    inner = [n for n, normal in enumerate(found["normal"]) if abs(normal) <= 2]
    for index in inner:
        assert found["golden"][index] == pytest.approx(found["normal"][index], abs=0.15)
        assert found["candidate"][index] == pytest.approx(3 * found["golden"][index], abs=0.01)


def test_sigma_has_the_floors_sums_by_token_and_by_element() -> None:
    tokens, elements = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, 1.5, 2.0]])
    values = torch.zeros(2, 3)
    floor = Floor(("a",), tokens, elements)
    site = JudgedSite(
        values, values, values, torch.arange(2), 2, TokenLayout(3, 0), floor, {}, 2**-8
    )
    squares = sigma(site).square()
    assert squares.sum(1).tolist() == pytest.approx([1.0, 3.0])
    assert squares.sum(0).tolist() == pytest.approx([0.5, 1.5, 2.0])


def test_worst_elements_say_where_in_floors_and_keep_nan() -> None:
    golden = torch.zeros(3, 8)
    candidate = golden.clone()
    candidate[1, 6] = 0.5
    candidate[2, 1] = math.nan
    floor = torch.full((3, 8), 0.25, dtype=torch.float64)
    sides = Sides(golden, candidate, golden)
    first, second = worst_elements(sides, floor, [(0, 0), (1, 1), (2, 1)], 2)
    assert math.isnan(first.candidate)
    assert (first.sequence, first.token, first.head, first.channel) == (2, 1, 0, 1)
    assert (second.sequence, second.token, second.head, second.channel) == (1, 1, 1, 2)
    assert (second.error, second.reference) == (2.0, 0.0)


def dumped(folder: Path, width: int = 300) -> Verdict:
    """Return a comparison of two dumps, of which channel 7 of layer 1's MLP is wrong."""
    from layerparity.judge.conclude import conclude
    from layerparity.record.stored_run import from_folder

    random = np.random.default_rng(0)
    for layer in range(3):
        values = random.standard_normal((1, 8, width), dtype=np.float32)
        for side in ("golden", "candidate"):
            (folder / side).mkdir(parents=True, exist_ok=True)
            if (layer, side) == (1, "candidate"):
                values[..., 7] *= 2
            np.save(folder / side / f"{layer}.npy", values)
            (folder / side / "names.json").write_text(json.dumps({"{n}": "layers.{n}.mlp:out"}))
    runs = [[from_folder(folder / side)] for side in ("golden", "candidate")]
    return conclude(*runs, FixedTolerance(), portrait=True)


def test_portrait_without_a_reference_is_against_the_golden(tmp_path: Path) -> None:
    found = dumped(tmp_path).portrait
    assert found is not None
    assert (found.site, found.unit) == ("layers.1.mlp:out", GOLDEN)
    channels = found.groups["channel"]
    assert (channels.size, channels.count) == (3, 300)
    assert len(channels.values["layers.1.mlp:out"]) == 100 <= MOST_GROUPS
    wrong = [n for n, value in enumerate(channels.values["layers.1.mlp:out"]) if value]
    assert wrong == [7 // 3]
    assert not any(channels.values["layers.0.mlp:out"])
    assert all((each.head, each.channel) == (None, 7) for each in found.worst)
    assert {row[1] for row in worst_rows(found)} == {"channel 7"}
    assert found.worst[0].reference is None
    assert found.quantiles == {}


def test_nothing_to_show_leaves_a_comparison_as_it_is() -> None:
    for name in ("pass", "empty", "oddities"):
        assert CASES[name].portrait is None
        assert "The guilty site" not in words_of(CASES[name])


def test_a_fault_is_named_and_shown(run: Callable[..., Ended], store: Path) -> None:
    port = ("port=fault", "port.name=qk_norm_per_head", "port.layers=[3]")
    made = run(
        "backend=gpu", "device_map=cpu", "kind=candidate", "capture=components", *port, "name=bad"
    )
    assert made.exit == 0, made.err
    ended = run("job=compare", "golden=the-golden", "candidate=bad")
    assert ended.exit == 1, ended.err
    said = " ".join(ended.out.split())
    assert "where layers.3.self_attn.q_norm is the first wrong place" in said
    assert re.search(r"^cause +shown \(\d+ %\): the norm is taken over each head", ended.out, re.M)
    assert "against the reference" in said
    assert "against the golden" in said
    assert "candidate=layers.3.self_attn.q_norm-alone" in said
    newest = max(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime)
    assert f"        {newest.parent / 'report.md'}\n" in ended.out
    comparison = Verdict.from_json(newest.read_text())
    assert str(comparison.guilty) == "layers.3.self_attn.q_norm"
    answer = answer_of(comparison)
    assert answer is not None
    assert "taken over each head" in answer.cause
    # By the same limits, judged again, it is shown as well.
    assert run("job=judge").exit == 1
    newest = max(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime)
    assert Verdict.from_json(newest.read_text()).causes == comparison.causes
    portrait = comparison.portrait
    assert portrait is not None
    assert (portrait.site, portrait.unit) == ("layers.3.self_attn.q_norm:out", FLOOR)
    heads = portrait.groups["head"].values
    assert len(heads) == 6
    assert max(heads["layers.2.self_attn.q_norm:out"]) < 3 < max(heads[portrait.site])
    assert max(map(abs, portrait.quantiles["golden"])) < 30
    assert max(portrait.quantiles["candidate"]) > 1e4
    assert portrait.load["layers.0.mlp.gate:choices"]["golden"]
    assert len(portrait.worst) == 16
    page = (newest.parent / "report.html").read_text().replace("<wbr>", "")
    assert "layers.3.self_attn.q_norm</strong>" in page
    assert "against the reference" in page
    assert "against the golden" in page
    ticket = newest.parent / "report.md"
    assert "## Worst elements" in ticket.read_text()


def test_a_fault_that_only_choices_show_stays_in_its_block(
    run: Callable[..., Ended], store: Path
) -> None:
    port = ("port=fault", "port.name=router_bias_dropped", "port.layers=[2]")
    made = run(
        "backend=gpu", "device_map=cpu", "kind=candidate", "capture=components", *port, "name=other"
    )
    assert made.exit == 0, made.err
    ended = run("job=compare", "golden=the-golden", "candidate=other")
    assert ended.exit == 1, ended.err
    newest = max(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime)
    comparison = Verdict.from_json(newest.read_text())
    failed = [str(r.site) for r in comparison.rows if r.outcome is Outcome.FAIL]
    assert failed == ["layers.2.mlp.gate:choices"]
    portrait = comparison.portrait
    assert portrait is not None
    assert portrait.site in ("layers.2.mlp.experts:out", "layers.2.mlp:out")
    assert portrait.instead == Instead(InsteadKind.FOLLOWING, "layers.2.mlp.gate:choices")
    said = instead_text(portrait)
    assert said == (
        "layers.2.mlp.gate:choices shows the fault, and holds no real numbers to look at: below is "
        f"{portrait.site}, which is computed from it."
    )
    # It is not clean: the elements and the histogram show what other experts give.
    assert portrait.worst[0].error > 0.01
    assert sum(portrait.ulp["candidate"][ULP_EDGES.index(64.0) :]) > 100
    page = (newest.parent / "report.html").read_text().replace("<wbr>", "")
    assert said in page
    assert "The guilty place: " in page
    assert 'Load, <span class="site">layers.2.mlp.gate:choices' in page
    assert "which is computed from it" in (newest.parent / "report.md").read_text()


def close_up(rows: list[Row], guilty: str, site: str = "") -> CloseUp | None:
    shows = Site.parse(site) if site else None
    guilt = Guilt(Place.parse(guilty), site=shows) if guilty else None
    verdict = replace(GUILTY, rows=tuple(rows), total=len(rows), guilty=guilt)
    return choose_close_up(verdict, [row for row in rows if row.kind is Kind.REAL])


def closest(rows: list[Row], guilty: str, site: str = "") -> str:
    chosen = close_up(rows, guilty, site)
    assert chosen is not None
    return str(chosen.site)


def judged(text: str, error: float, outcome: Outcome = Outcome.PASS) -> Row:
    kind = Kind.INDEX_SET if "choices" in text else Kind.REAL
    return Row(Site.parse(text), kind, outcome, metrics={"rel_l2": error, "error_ratio": error})


def test_the_guilty_block_is_not_left() -> None:
    choices = "layers.2.mlp.gate:choices"
    rows = [
        judged("layers.2.mlp.gate:logits", 0.1),
        judged(choices, 0.0, Outcome.FAIL),
        judged("layers.2.mlp:out", 0.3, Outcome.INCONCLUSIVE),
        judged("layers.2.mlp.experts:out", 0.2, Outcome.INCONCLUSIVE),
        judged("layers.5.mlp:out", 0.9, Outcome.INCONCLUSIVE),
        judged("layers.2.mlp:out@decode.1", 0.9, Outcome.INCONCLUSIVE),
    ]
    found = close_up(rows, "layers.2.mlp.gate", choices)
    assert found is not None
    assert str(found.site) == "layers.2.mlp:out"
    failing = judged("layers.2.mlp.experts:out", 0.2, Outcome.FAIL)
    others = [row for row in rows if row.site != failing.site]
    assert closest([*others, failing], "layers.2.mlp.gate", choices) == "layers.2.mlp.experts:out"


def test_where_no_real_number_is_off_it_is_said_and_nothing_is_drawn() -> None:
    choices = "layers.2.mlp.gate:choices"
    rows = [judged("layers.2.mlp:out", 0.0), judged(choices, 0.0, Outcome.FAIL)]
    found = close_up([*rows, judged("layers.5.mlp:out", 0.9)], "layers.2.mlp.gate", choices)
    assert found is not None
    assert (found.site, str(found.place)) == (None, choices)
    shown = replace(GUILTY, portrait=Portrait(choices, GOLDEN, instead=found.instead))
    assert (
        f"{choices} shows the fault, and holds no real numbers to look at; no site of real numbers "
        "in its block is off." in words_of(shown)
    )
    assert Verdict.from_json(shown.to_json()).portrait == shown.portrait
    assert "Worst elements" not in words_of(shown)


def test_a_guilt_of_weights_alone_is_shown_in_its_place() -> None:
    rows = [
        judged("layers.2.self_attn.q_proj:out", 0.1),
        judged("layers.2.mlp:out", 0.3),
        judged("layers.5.mlp:out", 0.9),
    ]
    found = close_up(rows, "layers.2.self_attn.q_proj")
    assert found is not None
    assert str(found.site) == "layers.2.self_attn.q_proj:out"
    assert found.instead == Instead(InsteadKind.LARGEST_ERROR, "layers.2.self_attn.q_proj")
    assert instead_text(Portrait(str(found.site), GOLDEN, instead=found.instead)) == (
        "The weights of layers.2.self_attn.q_proj are what is wrong: no site of it shows that by "
        "itself. Below is the site with the largest error there."
    )
    assert closest(rows, "layers.2.self_attn.k_norm") == "layers.2.mlp:out"
    alone = close_up(rows, "layers.3.mlp")
    assert alone is not None and alone.site is None
    assert instead_text(Portrait("layers.3.mlp:out", GOLDEN, instead=alone.instead)) == (
        "The weights of layers.3.mlp are what is wrong: no site of it shows that by itself, and no "
        "site of real numbers there can be shown."
    )
    assert closest(rows, "") == "layers.5.mlp:out"


def test_page_begins_with_the_first_wrong_place_and_its_cause() -> None:
    words = words_of(GUILTY)
    labels = (
        "where",
        "cause very likely (93 %)",
        "by how much",
        "next",
        "evidence",
        "The two runs",
    )
    places = [words.index(each) for each in labels]
    assert places == sorted(places)
    assert words.index("where") < words.index("is the first wrong place") < places[1]
    assert "<it> fails & more" in words
    assert "python run.py job=compare" in words[places[3] : places[4]]
    assert "The guilty site: layers.3.self_attn.q_proj:out" in words
    assert "The site with the largest R" in words_of(CASES["calibrated pass"])
    assert "Each row is 48 channels" in words


def test_markdown_has_the_headline_and_the_worst_elements() -> None:
    answer = Answer(
        f"{GUILTY.where} is the first wrong place",
        cause="very likely (93 %): the norm is taken over each head",
        evidence=("<it> fails & more",),
        next=("# a remark", "python run.py scope=single layer=3"),
    )
    text = render_markdown(GUILTY, answer)
    labels = ("is the first wrong place", "**Cause**", "**Evidence**", "**Next**", "## Runs")
    places = [text.index(each) for each in labels]
    assert places == sorted(places)
    assert "\n- \\<it\\> fails & more\n" in text
    assert "```sh\n# a remark\npython run.py scope=single layer=3\n" in text
    assert (
        "| sequence | token | element | golden | candidate | reference | noise floors off |" in text
    )
    assert "| 0 | 0 | head 2, channel 0 | -0.25 | 2.5 | -0.2500001 | 1.0e6 |" in text


def test_a_stored_verdict_comes_back_whole_with_the_same_answer() -> None:
    again = Verdict.from_json(GUILTY.to_json())
    assert again == GUILTY
    assert answer_of(again) == answer_of(GUILTY)


def test_tables_of_many_sites_leave_details_to_the_site_itself() -> None:
    row = GUILTY.rows[1]
    names = {measure.name for measure in present([row])}
    assert "floor_rel_l2" in names
    assert "error_ratio_head_index" not in names
    assert "floor_rel_l2" not in {measure.name for measure in compared([row])}
    head = next(m for m in present([replace(row, metrics={"error_ratio_head": 3.0})]))
    assert which(row, head) == "head 3"


def test_many_layers_stay_bounded() -> None:
    deep = calibrated(62, "layers.31.self_attn.q_proj:out", "chained", 4096, 256)
    assert len(html_of(deep).encode()) < 4_000_000
