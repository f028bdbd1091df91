"""Figures of the noise floor, of the guilty site, and of the experts."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from report_samples import CASES, calibrated, html_of, real, sample, worded
from test_report import words_of
from test_report_figures import columns, hovers, parsed

from layerparity.anatomy.site import Kind, Site
from layerparity.record.portrait import GOLDEN, Grouped, Portrait
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Outcome, Row
from layerparity.report.distributions import quantile_plot
from layerparity.report.distributions import ulp_histogram as drawn_ulp
from layerparity.report.experts import agreement_by_layer, agreement_text, load_figure
from layerparity.report.heatmaps import group_heatmap
from layerparity.report.html import noise
from layerparity.report.noise_by_layer import accumulated_error, local_error
from layerparity.report.stages import stages, table_rows

GUILTY = CASES["calibrated"]
CHAINED = CASES["calibrated chained"]


def test_local_error_stands_over_the_band_of_its_floor() -> None:
    figure = local_error(columns(GUILTY), GUILTY, "self_attn.q_proj:out")
    assert len(parsed(figure).findall(".//{*}path[@class='band']")) == 6
    assert len(parsed(figure).findall(".//{*}path[@class='band far']")) == 6
    titles = hovers(figure)
    assert "layer 3, candidate: 0.31" in titles
    assert "2 times it" in figure
    assert local_error(columns(CASES["fail"]), CASES["fail"], "mlp:out") == ""


def test_accumulated_error_grows_by_the_root_of_the_sum_of_squares() -> None:
    flat = calibrated(5, feed="chained")
    titles = hovers(accumulated_error(columns(flat), flat))
    band = [float(t.rpartition(" ")[2]) for t in titles if re.match(r"layer \d+: \d", t)]
    assert band == pytest.approx([1.5e-7 * math.sqrt(n) for n in range(1, 6)], rel=0.05)
    assert "the candidate, chained" in accumulated_error(columns(CHAINED), CHAINED)
    assert "local errors, added up" in accumulated_error(columns(GUILTY), GUILTY)


def test_group_heatmaps_name_the_groups_of_a_row() -> None:
    assert GUILTY.portrait is not None
    titles = hovers(group_heatmap(columns(GUILTY), GUILTY.portrait, "head", GUILTY.limits))
    assert len([title for title in titles if title.startswith("layer 3, head ")]) == 48
    channels = hovers(group_heatmap(columns(GUILTY), GUILTY.portrait, "channel", GUILTY.limits))
    assert any(title.startswith("layer 3, channels 0–47: ") for title in channels)
    assert group_heatmap(columns(GUILTY), GUILTY.portrait, "expert", GUILTY.limits) == ""
    uneven = replace(GUILTY.portrait, groups={"expert": Grouped(3, 7, {GUILTY.where: [1.0] * 3})})
    shown = hovers(group_heatmap(columns(GUILTY), uneven, "expert", GUILTY.limits))
    assert "layer 3, expert 6: 1" in shown


def test_distributions_show_both_sides_and_nothing_where_there_is_nothing() -> None:
    assert GUILTY.portrait is not None
    figure = drawn_ulp(GUILTY.portrait)
    assert 'class="outline"' in figure
    assert "up to 1.0e6 ULP: 5 elements, 2.86 %" in hovers(figure)
    assert len(re.findall("<circle", quantile_plot(GUILTY.portrait))) == 2 * 29
    empty = Portrait("layers.0:out", GOLDEN)
    assert drawn_ulp(empty) == quantile_plot(empty) == ""


def test_experts_are_told_apart_by_flips_and_load() -> None:
    assert "every token to the same experts, in all 6 layers" in agreement_text(columns(sample()))
    assert agreement_by_layer(columns(sample())) == ""
    row = real("layers.2.mlp.gate:choices", 0.0, Outcome.FAIL)
    row.metrics.update(set_agreement=0.5, flips=4.0, flips_outside_noise=3.0)
    comparison = sample()
    rows = [row if each.site == row.site else each for each in comparison.rows]
    across = columns(replace(comparison, rows=tuple(rows)))
    assert "1 of 6 layers: 4 tokens, of which 3 are no ties" in agreement_text(across)
    assert any("50 % of the tokens agree" in each for each in hovers(agreement_by_layer(across)))
    figure = load_figure({"golden": [4, 0], "candidate": [1, 3]})
    assert "expert 1: golden 0, candidate 3" in hovers(figure)
    assert "3 of 4 choices went elsewhere" in figure


def test_decode_steps_that_were_skipped_are_told_in_a_line() -> None:
    def unrun(step: int) -> Reason:
        values = {"side": "candidate", "phase": "decode", "step": step}
        return Reason(ReasonKind.NO_STEP, values)

    names = [f"layers.3.mlp:out@decode.{step}" for step in range(1, 40)]
    skipped = [
        Row(Site.parse(name), Kind.REAL, Outcome.SKIPPED, why=unrun(step))
        for step, name in enumerate(names, 1)
    ]
    comparison = replace(GUILTY, rows=(*GUILTY.rows, *skipped), total=GUILTY.total + 39)
    layer = next(each for each in stages(comparison) if each.layer == 3)
    rows, alike = table_rows(layer)
    assert alike == [(39, "the candidate ran no decode step")]
    assert len(rows) == len(layer.rows) - 39
    html = html_of(comparison)
    assert names[0] not in html
    assert "39 sites: the candidate ran no decode step" in words_of(comparison)
    assert "block in, input_layernorm:out" in words_of(comparison)
    # What the author of a port says of each step stays as it was said.
    said = [
        replace(row, why=worded(f"step {n} is kept on a page")) for n, row in enumerate(skipped)
    ]
    comparison = replace(GUILTY, rows=(*GUILTY.rows, *said), total=GUILTY.total + 39)
    layer = next(each for each in stages(comparison) if each.layer == 3)
    assert table_rows(layer) == (list(layer.rows), [])


def ticks(figure: str) -> list[str]:
    return re.findall(r">(1e-?\d+)</text>", figure)


def test_errors_and_accumulated_errors_share_a_scale() -> None:
    site = "self_attn.q_proj:out"
    local = local_error(columns(GUILTY), GUILTY, site)
    added = accumulated_error(columns(GUILTY), GUILTY, site)
    assert ticks(local) == ticks(added)
    assert len(ticks(local)) > len(ticks(accumulated_error(columns(GUILTY), GUILTY)))
    shown = noise(columns(GUILTY), GUILTY, site)
    assert ticks(shown["local"]) == ticks(shown["accumulated"])
