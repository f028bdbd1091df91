"""The figures of the report: well-formed, honest about zero, NaN, gaps and binning."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from report_portraits import portrait
from report_samples import (
    CASES,
    COMPONENTS,
    LIMITS,
    all_zero,
    every_case,
    every_oddity,
    html_of,
    judged,
    markdown_of,
    real,
    sample,
)
from test_report import words_of

from layerparity.anatomy.block import label
from layerparity.anatomy.site import Kind, Site
from layerparity.ground.numeral import numeral
from layerparity.record.verdict import Breach, Outcome, Row, Verdict
from layerparity.record.weights import FATE_NUMBERS, Fate, WeightFinding
from layerparity.report.answer import numbers_text
from layerparity.report.columns import Columns
from layerparity.report.error_by_layer import error_by_layer
from layerparity.report.heatmaps import Bins, binning, metric_heatmap, token_heatmap
from layerparity.report.measures import BY_NAME, beyond
from layerparity.report.stages import fold, stages
from layerparity.report.svg import STEPS, Shade, ink_on, luminance, ramp, stylesheet


def columns(comparison: Verdict) -> Columns:
    return Columns(stages(comparison))


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<all>{markup}</all>")


def hovers(markup: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", markup)


@every_case
def test_figures_are_well_formed(comparison: Verdict) -> None:
    across = columns(comparison)
    figures = [
        error_by_layer(across, comparison),
        metric_heatmap(across, comparison.limits),
        *(token_heatmap(across, comparison.token_errors, x) for x in (":out", "mlp:out")),
    ]
    for figure in figures:
        if figure:
            assert len(parsed(figure).findall(".//{*}svg[@role='img']")) == 1
            assert "nan" not in re.sub(r"<title>[^<]*</title>", "", figure)


def test_names_from_elsewhere_do_not_break_a_figure() -> None:
    row = replace(real("layers.0:out", 0.1), metrics={"rel_l2": 0.1, '<b a="c">&': 1.0})
    assert "<b" not in metric_heatmap(columns(judged([row])), {})
    assert len(parsed(metric_heatmap(columns(judged([row])), {}))) == 2


def test_no_data_gives_no_figure() -> None:
    empty = columns(judged([]))
    assert error_by_layer(empty, judged([])) == metric_heatmap(empty, {}) == ""
    assert token_heatmap(columns(CASES["pass"]), {}, ":out") == ""


def test_error_by_layer_draws_every_class_of_site_with_its_own_shape() -> None:
    comparison = sample(extra=COMPONENTS)
    figure = error_by_layer(columns(comparison), comparison)
    key = " ".join(parsed(figure).find("ul").itertext())
    for name in ("block out", "attention out", "MLP out", "router logits", "outside the blocks"):
        assert name in key
    assert "3 more in the table" in key
    shapes = re.findall(r'<path class="dot \w+" d="([^"]+)"', figure[: figure.index("</ul>")])
    assert len(shapes) == len(set(shapes)) == 7


def test_error_by_layer_puts_zero_and_nan_in_lanes_of_their_own() -> None:
    zero = error_by_layer(columns(all_zero()), all_zero())
    assert "exactly 0" in zero
    assert "NaN or ∞" not in zero
    unlimited = replace(every_oddity(), limits={})
    odd = error_by_layer(columns(unlimited), unlimited)
    assert "exactly 0" in odd
    assert "NaN or ∞" in odd
    assert "layers.0.mlp:out: rel L2 NaN, fail" in hovers(odd)
    assert "layers.4:out@decode.3: rel L2 4.0e-7, pass" in hovers(odd), "the worst of the steps"


def test_error_by_layer_draws_no_line_across_a_layer_that_was_not_compared() -> None:
    rows = [real(f"layers.{layer}:out", 1e-6) for layer in (0, 1, 4, 5)]
    figure = error_by_layer(columns(judged(rows)), judged(rows))
    line = re.findall(r'class="line s0" d="([^"]*)"', figure)[-1]
    assert re.sub(r"[^ML]", "", line) == "MLML"


def test_error_by_layer_rises_with_the_error_and_marks_failure_and_limit() -> None:
    figure = error_by_layer(columns(CASES["fail"]), CASES["fail"])
    heights = {
        title: float(y)
        for y, title in re.findall(r"translate\([\d.]+ ([\d.]+)\)\"><title>([^<]*)", figure)
    }
    failed = heights.pop("layers.3.mlp:out: of limit 260, fail")
    assert all(failed < y for name, y in heights.items() if "layers" in name)
    assert ">limit 1<" in figure
    assert "first failure: layer 3" in hovers(figure)
    assert "first failure" not in error_by_layer(columns(CASES["pass"]), CASES["pass"])


@pytest.mark.parametrize("name", ["pass", "calibrated pass", "fail", "calibrated"])
def test_error_by_layer_shows_what_is_judged_and_its_limit(name: str) -> None:
    comparison = CASES[name]
    figure = error_by_layer(columns(comparison), comparison)
    calibrated = comparison.tolerance == "calibrated"
    assert (
        f"<title>{'R by layer' if calibrated else 'Errors over their limits by layer'}<" in figure
    )
    height = float(re.findall(r'class="limit" d="M[\d.]+ ([\d.]+)H', figure)[0])
    points = re.findall(r"translate\([\d.]+ ([\d.]+)\)\"><title>([^<]*)", figure)
    assert points
    for y, title in points:
        assert (float(y) < height) is title.endswith(", fail"), title


def test_metric_heatmap_shows_the_worst_value_of_a_layer() -> None:
    figure = metric_heatmap(columns(CASES["fail"]), LIMITS)
    titles = hovers(figure)
    assert "layers.3.mlp:out: rel L2 0.31, fail" in titles
    assert "layers.3:out: rel L2 0.041, fail" not in titles
    assert len([title for title in titles if ": Pearson " in title]) == 9
    assert ">0.31</text>" in figure, "printed where cells are wide enough"
    wide = metric_heatmap(columns(sample(62)), LIMITS)
    assert not re.search(r'class="value', wide)


def test_metric_heatmap_marks_what_is_beyond_its_limit() -> None:
    corners = re.compile(r"h7v7z")
    assert len(corners.findall(metric_heatmap(columns(CASES["fail"]), LIMITS))) == len(LIMITS)
    assert not corners.findall(metric_heatmap(columns(CASES["pass"]), LIMITS))


def test_token_heatmap_keeps_the_largest_error_of_a_row_and_says_how_many_it_holds() -> None:
    errors = [1e-7] * 4096
    errors[1000] = 0.5
    rows = [real("layers.0:out", 1e-4)]
    across = columns(judged(rows))
    figure = token_heatmap(across, {"layers.0:out": errors}, ":out")
    assert binning(across, {"layers.0:out": errors}, ":out") == 43
    cells = [title for title in hovers(figure) if title.startswith("layer 0, tokens")]
    assert len(cells) == Bins(4096).count == 96
    assert [cell for cell in cells if cell.endswith(": 0.5")] == ["layer 0, tokens 989–1031: 0.5"]


def test_token_heatmap_appends_decode_steps_and_keeps_nan() -> None:
    comparison = every_oddity()
    titles = hovers(token_heatmap(columns(comparison), comparison.token_errors, ":out"))
    assert "layer 4, token 4: 1.0e-5" in titles
    assert "layer 0, token 0: NaN" in titles


def test_report_says_that_tokens_are_binned_and_which_component_is_shown() -> None:
    words = words_of(sample(3, "layers.1.self_attn:out", tokens=200))
    assert "Each row is 3 tokens and shows the largest of their errors." in words
    after = words[words.index("Token × layer") :]
    assert after.index("block out") < after.index("attention out")
    assert "This comparison holds no errors by token." in words_of(judged([]))


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_even_steps_of_lightness_with_readable_text(dark: bool) -> None:
    colours = ramp(dark)
    assert len(set(colours)) == STEPS
    # CIE lightness, by another formula than the one that made the colours.
    light = [116 * luminance(c) ** (1 / 3) - 16 for c in colours]
    steps = [after - before for before, after in pairwise(light)]
    assert all(step > 0 for step in steps) if dark else all(step < 0 for step in steps)
    assert max(map(abs, steps)) < 2 * min(map(abs, steps))
    for colour in colours:
        pair = sorted((luminance(colour), luminance(ink_on(colour))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
    assert f"--q{STEPS - 1}:{ramp()[-1]}" in stylesheet()


def test_shade_is_pale_up_to_the_limit_and_never_beyond_it() -> None:
    calm = Shade.over([1e-7, 0.01], limit=0.01)
    wrong = Shade.over([1e-7, 0.01, 0.011, 40.0], limit=0.01)
    for shade in (calm, wrong):
        assert [shade.step(each) for each in (1e-7, 0.005, 0.01)] == [0, 1, 2]
        assert shade.step(0.011) >= STEPS / 4
    assert wrong.step(40.0) == calm.step(1.0) == STEPS - 1
    assert calm.classes(0.0)[0] != calm.classes(1e-7)[0] != calm.classes(math.nan)[0]


def test_shade_without_a_limit_is_pale_up_to_the_largest_error_that_passes() -> None:
    shade = Shade.over([2e-7, 5e-7, 0.3], passing=[2e-7, 5e-7, 0.0, math.nan])
    assert shade.step(5e-7) < STEPS / 4 < shade.step(0.3)
    # A site that passes by a limit of two metrics together may be beyond one of them.
    assert Shade.over([0.9], passing=[0.9], limit=0.5).step(0.9) < STEPS / 4
    assert Shade.over([0.8, 0.9]).step(0.8) > 3 * STEPS / 4
    assert Shade.over([]).step(1.0) == STEPS - 1
    assert Shade.over([5e-324, 1e308]).step(1e308) == STEPS - 1


@pytest.mark.parametrize("name", ["pass", "components", "calibrated pass"])
def test_every_colour_of_a_pass_is_calm(name: str) -> None:
    def steps(comparison: Verdict) -> list[int]:
        html = html_of(comparison)
        # How many tokens an expert got is no error.
        before, _, rest = html.partition('id="experts"')
        errors = before + rest[rest.find('id="error"') :]
        return [int(step) for step in re.findall(r'class="q(\d+)"', errors)]

    used = steps(CASES[name])
    assert used and max(used) < STEPS / 4
    assert max(steps(CASES["calibrated" if name == "calibrated pass" else "fail"])) > STEPS / 2


def test_a_number_is_written_in_one_way() -> None:
    shown = [numeral(x) for x in (1234.5, 999.7, 9999.4, 1_774_321.5, 123.4, 0.00012)]
    assert shown == ["1234", "1000", "9999", "1.8e6", "123", "1.2e-4"]
    site = Site.inside(3, "mlp:out")
    metrics = {"error_ratio": 1_774_321.5, "rel_l2": 1.23e-5, "norm_ratio": 1234.5678}
    assert numbers_text(Row(site, Kind.REAL, Outcome.FAIL, metrics=metrics)) == (
        "error against the reference 1.8e6 times the floor of rounding, "
        "relative L2 error against the golden 1.2e-5, norm 1235 times the golden's"
    )


@pytest.mark.parametrize("value", [1.23e-7, 5.43e5, 3.21e12])
def test_no_sentence_of_a_report_writes_a_number_in_another_way(value: float) -> None:
    names = ("error_ratio", "error_ratio_head", "slope", "slope_token", "norm_ratio", "outlier")
    names += ("offset", "replicas_apart", "pearson", "rel_l2", "novel")
    beside = ("slope_z", "slope_token_ratio", "offset_z", "outlier_z")
    broken = tuple(Breach(name, value, value / 3, 2) for name in names)
    row = real("layers.0.mlp:out", value)
    row = replace(row, outcome=Outcome.FAIL, breaches=broken)
    row.metrics.update(dict.fromkeys((*names, *beside), value))
    verdict = judged([row], {"layers.0.mlp:out": [value, 3 * value]})
    fates = [each for each, numbers in FATE_NUMBERS.items() if numbers and each is not Fate.SLICED]
    weights = tuple(
        WeightFinding(
            "model.norm.weight", "norm", None, "norm", "changed_value", each, numbers=numbers
        )
        for each in fates
        for numbers in [dict.fromkeys(FATE_NUMBERS[each], value)]
    )
    shown = portrait("layers.0.mlp:out", 1, 4, random.Random(7))
    worst = tuple(replace(each, golden=value, candidate=-value) for each in shown.worst)
    verdict = replace(verdict, weights=weights, portrait=replace(shown, worst=worst))
    for said in (html_of(verdict), markdown_of(verdict)):
        assert not re.findall(r".{40}\d(?:e\+|e-?0)\d.{9}", said)


def test_numbers_close_to_their_ideal_are_not_rounded_onto_it() -> None:
    assert BY_NAME["pearson"].show(1 - 3e-12) == "1−3e-12"
    assert BY_NAME["norm_ratio"].show(1 + 2e-7) == "1+2e-7"
    assert BY_NAME["similarity_percentage"].show(100 - 1e-7) == "<100"
    assert BY_NAME["similarity_percentage"].show(99.9876) == "99.9876"
    assert BY_NAME["pearson"].show(1.0) == "1"
    shown = [numeral(x) for x in (0.0, 12.0, 0.03125, 4.2e-7, -math.inf, math.nan, 1e300)]
    assert shown == ["0", "12", "0.0312", "4.2e-7", "−∞", "NaN", "1.0e300"]


def test_a_value_is_flagged_where_its_row_broke_that_limit_slopes_among_them() -> None:
    slope, limits = 0.003, {"error_ratio": 2.0, "slope": 0.0005}
    broken = (Breach("slope_head", slope, limits["slope"], 3),)
    metrics = {"rel_l2": 0.004, "error_ratio": 0.9, "slope": 0.0009, "slope_head": slope}
    wrong = Row(Site.parse("layers.1.mlp:out"), Kind.REAL, Outcome.FAIL, broken, metrics=metrics)
    right = replace(wrong, site=Site.parse("layers.0.mlp:out"), outcome=Outcome.PASS, breaches=())
    assert beyond(wrong, BY_NAME["slope_head"])
    assert not beyond(wrong, BY_NAME["slope"]), "large, and not significant"
    assert not beyond(right, BY_NAME["slope_head"])
    verdict = replace(judged([right, wrong]), limits=limits, tolerance="calibrated")
    html = html_of(verdict)
    table = html[html.index('id="sites"') :]
    assert '<th scope="col" class="number">slope, worst head</th>' in table
    assert table.count('<td class="number beyond">0.003') == 1
    assert len(re.findall("h7v7z", metric_heatmap(columns(verdict), limits))) == 1
    assert "slope, worst head 0.003 of 5.0e-4 (head 3)" in words_of(verdict)


def test_a_share_of_tokens_is_a_percentage() -> None:
    judged_tokens = BY_NAME["agreeing_tokens"]
    assert [judged_tokens.show(x) for x in (1.0, 0.9941, 0.99999, 0.0)] == [
        "100 %",
        "99.4 %",
        "99.999 %",
        "0 %",
    ]


def test_snr_of_equal_tensors_is_no_error_and_never_overflows() -> None:
    snr = BY_NAME["snr_db"]
    assert snr.badness(320.0) == snr.badness(math.inf) == 0.0
    assert math.isclose(snr.badness(20.0), 0.1)
    assert math.isfinite(snr.badness(-math.inf))


def test_layers_fold_only_where_there_are_many_and_never_hide_the_first_failure() -> None:
    assert len(fold(stages(CASES["fail"]))) == 9
    folded = fold(stages(sample(62, "layers.31.mlp:out", feed="chained")))
    names = ["embed_tokens", "layers 0–30", "layer 31", "layers 32–61", "norm", "lm_head"]
    assert [each.name for each in folded] == names
    assert folded[1].outcome is Outcome.PASS
    assert label(folded[2].worst.site.local) == "MLP out"
