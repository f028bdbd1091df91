"""The expert load panels: experts x layers on both sides and the difference, of bounded size."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from report_samples import calibrated, html_of
from test_report import words_of

from layerparity.report.expert_load import Load, Panel, experts_per_row, load_panels, load_text


def loads(layers: int, experts: int) -> dict[str, dict[str, list[int]]]:
    """Return loads in which layer 1 sent 5 tokens from expert 0 to expert 3, and expert 2 rests."""
    even = [0 if expert == 2 else 10 for expert in range(experts)]
    moved = [5, *even[1:3], 15, *even[4:]]
    return {
        f"layers.{n}.mlp.gate:choices": {"golden": even, "candidate": moved if n == 1 else even}
        for n in range(layers)
    }


def cells(panel: Panel) -> dict[str, int]:
    """Return how many cells each class of a panel has."""
    drawn = re.findall(r'<path class="(\w+)" d="([^"]*)"', panel.figure)
    return {name: shape.count("z") for name, shape in drawn}


def test_panels_show_both_loads_and_what_moved() -> None:
    golden, candidate, moved = load_panels(loads(3, 8))
    assert [each.title for each in (golden, candidate, moved)] == [
        "Golden",
        "Candidate",
        "Candidate − golden",
    ]
    # On one scale: 10 of at most 15 tokens. Nobody's cell is an expert's without tokens.
    assert cells(golden) == {"q10": 21, "qz": 3}
    assert cells(candidate) == {"q10": 19, "q5": 1, "q15": 1, "qz": 3}
    assert cells(moved) == {"lane": 22, "less4": 1, "more4": 1}
    assert "layer 1: 5 of 70 choices moved" in moved.figure
    assert load_text(loads(3, 8)) == "The scale ends at 15 tokens; the largest difference is 5."


def test_equal_loads_say_so() -> None:
    same = {k: {"golden": v["golden"], "candidate": v["golden"]} for k, v in loads(2, 8).items()}
    assert "No expert's load differs." in load_text(same)
    assert set(cells(load_panels(same)[2])) == {"lane"}


def test_one_layer_has_bars_and_no_panels() -> None:
    assert load_panels(loads(1, 8)) == load_panels({}) == []
    assert load_text({}) == ""


@pytest.mark.parametrize(("layers", "experts"), [(2, 8), (62, 256), (126, 1024)])
def test_panels_fit_a_phone_and_stay_small(layers: int, experts: int) -> None:
    load: Load = loads(layers, experts)
    for panel in load_panels(load):
        svg = ElementTree.fromstring(panel.figure).find("{*}svg")
        assert svg is not None
        assert float(svg.attrib["width"]) <= 288
        assert float(svg.attrib["height"]) <= 320
        assert sum(cells(panel).values()) <= layers * 64
        assert len(panel.figure) < 250_000
    assert experts_per_row(load) == max(experts // 64, 1)


def test_dense_layers_have_no_column_and_labels_are_real_layers() -> None:
    load = {k.replace("layers.0.", "layers.7."): v for k, v in loads(2, 8).items()}
    figure = load_panels(load)[0].figure
    assert re.findall(r">(\d+)</text>", figure)[-2:] == ["1", "7"]


def test_page_has_the_panels_and_says_how_experts_share_rows() -> None:
    deep = calibrated(20, "layers.7.mlp:out", "chained", experts=256)
    words = words_of(deep)
    assert "Load by layer" in words
    assert "Each row is 4 experts and shows the largest of their values." in words
    assert "Each row is" not in words_of(calibrated(6))[words_of(calibrated(6)).index("Load by") :]
    whole = html_of(calibrated(62, "layers.31.mlp:out", "chained", 512, 256))
    assert len(whole.encode()) < 3_500_000
    assert "prefers-color-scheme: dark" in whole
