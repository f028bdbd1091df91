"""Where a run's time went: measured, stored, added up, told on a terminal and in the report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy
import pytest
import torch
from conftest import ROOT, Ended
from report_samples import html_of, markdown_of, sample
from runs import make_run, sites
from test_report import Page, words_of

from layerparity.ground.errors import UserError
from layerparity.ground.profile import PARTS, RunProfile, Spent, StageProfile
from layerparity.judge.conclude import conclude
from layerparity.judge.dumps import open_dump
from layerparity.judge.sides import RunSet, add_up
from layerparity.judge.tolerances.fixed import Settings as FixedTolerance
from layerparity.making.terminal import profile_line
from layerparity.making.write import profile_metrics
from layerparity.model.checkpoint import Checkpoint
from layerparity.record.folder import PROFILE, RunFolder, stage_file
from layerparity.record.stored_run import from_folder
from layerparity.record.verdict import Verdict
from layerparity.report.cautions import warning_lines
from layerparity.report.time import seconds_text, time_by_stage

SVG = "{http://www.w3.org/2000/svg}"
GB = 10**9


def stage(times: float = 1.0, reference: float = 0.0) -> StageProfile:
    """A stage of 2 seconds and its reference; 0.6 of reading threads, half a gigabyte."""
    parts = {"wait": 0.2, "fingerprint": 0.3, "compute": 1.4, "reference": reference, "store": 0.1}
    loading = Spent(0.4 * times, 0.1 * times, 0.1 * times, int(times * GB / 2))
    spent = {part: seconds * times for part, seconds in parts.items()}
    return StageProfile(**spent, peak=int(4 * GB + times * GB), loading=loading)


def profile(layers: int = 6, **changes: float) -> RunProfile:
    names = ["embed_tokens", *(f"layers.{n}" for n in range(layers)), "norm", "lm_head"]
    return RunProfile(4 * GB, {name: stage(**changes) for name in names})


def with_profiles(
    golden: RunProfile | None, candidate: RunProfile | None, layers: int = 6
) -> Verdict:
    made = sample(layers)
    sides = replace(made.golden, profile=golden), replace(made.candidate, profile=candidate)
    return replace(made, golden=sides[0], candidate=sides[1])


BOTH = with_profiles(profile(reference=3.0), profile(2))


def test_components_of_one_block_are_one_step() -> None:
    parts = {f"layers.2.{name}": stage() for name in ("self_attn", "mlp")}
    found = [
        (n, value) for n, value, step in profile_metrics(RunProfile(4 * GB, parts)) if step == 2
    ]
    assert len(found) == len({name for name, _ in found})
    assert dict(found)["time/block ms"] == pytest.approx(2000 * stage().seconds)
    assert dict(found)["profile/memory peak MB"] == stage().peak / 1e6


# ---------------------------------------------------------------- a real run


@pytest.mark.parametrize("more", [(), ("generate.max_new_tokens=16", "reference.make=false")])
def test_a_run_accounts_for_its_time_and_its_bytes(
    cli: Callable[..., Ended], tmp_path: Path, more: tuple[str, ...]
) -> None:
    ended = cli("backend=gpu", "device_map=stream", *more)
    assert ended.exit == 0, ended.err
    (file,) = tmp_path.rglob(PROFILE)
    kept = RunFolder(file.parent).read_profile()
    assert kept is not None
    total = kept.total
    said = re.search(r"sites in ([\d.]+) s", ended.out)
    assert said
    whole = float(said[1])
    # What is rounded, and what starts and stops around the stages, is a tenth of a second.
    assert 0.75 * whole - 0.1 < total.seconds < whole + 0.05
    assert [part for part in PARTS if not getattr(total, part)] == (["reference"] if more else [])
    stored = Checkpoint(ROOT / "checkpoints/tiny_minimax_m2").tensors.values()
    # A token more is a pass more.
    assert total.loading.bytes == sum(each.bytes for each in stored) * (16 if more else 1)
    assert profile_line(kept) in ended.out.splitlines()


def test_the_memory_that_storing_takes_counts(
    cli: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = RunFolder.write_tensors

    def greedy(self: RunFolder, name: str, tensors: dict[str, torch.Tensor]) -> None:
        # The last stage's file is written while no stage runs.
        held = bytearray(b"x") * (200 << 20) if name == stage_file("lm_head") else b""
        # What looks at the memory does so fifty times a second.
        time.sleep(1 if held else 0)
        sound(self, name, tensors)
        del held

    monkeypatch.setattr(RunFolder, "write_tensors", greedy)
    assert cli("device_map=cpu", "reference.make=false").exit == 0
    (file,) = tmp_path.rglob(PROFILE)
    kept = RunFolder(file.parent).read_profile()
    assert kept is not None
    assert kept.stages["lm_head"].peak - kept.before > 200 << 20


# ---------------------------------------------------------------- the line


def test_the_line_says_the_largest_part_first_and_nothing_of_what_took_none() -> None:
    assert profile_line(profile(reference=3.0)) == (
        "time: 60 % reference, 28 % compute, 6 % fingerprint, 4 % waiting for weights, 2 % store; "
        "4.50 GB read at 1.25 GB/s; 1.00 GB of memory at most"
    )
    idle = RunProfile(0, {"layers.0": StageProfile(compute=1.0, store=0.001, peak=3_400_000)})
    assert profile_line(idle) == "time: 100 % compute; 3.40 MB of memory at most"
    assert profile_line(RunProfile(0, {"layers.0": StageProfile()})).startswith("time: ")


# ---------------------------------------------------------------- many runs as one


def test_a_sweep_is_added_up_by_stage_in_forward_order() -> None:
    first = RunProfile(4 * GB, {"layers.10": stage(), "norm": stage()})
    second = RunProfile(9 * GB, {"layers.2": stage(), "layers.10": replace(stage(), peak=12 * GB)})
    found = add_up([first, second])
    assert found is not None
    assert list(found.stages) == ["layers.2", "layers.10", "norm"]
    both = found.stages["layers.10"]
    assert (both.compute, both.loading.bytes) == (2.8, GB)
    # Each above what its own run held before: 12 of 9, not 12 of 4.
    assert both.peak == found.total.peak == 3 * GB
    assert first.stages["layers.10"] == stage()
    assert add_up([]) is None


def text_of(kept: RunProfile) -> str:
    return json.dumps(asdict(kept), indent=1)


def stored(folder: Path, text: str | None, seed: int = 0) -> object:
    made = make_run(folder, sites(seed))
    if text is not None:
        (folder / PROFILE).write_text(text)
    return made


def compared(golden: list, candidate: list) -> Verdict:
    return conclude(golden, candidate, FixedTolerance())


def test_stored_profiles_reach_the_report_and_a_stored_comparison(tmp_path: Path) -> None:
    kept = profile(2, reference=1.0)
    golden = stored(tmp_path / "golden", text_of(kept))
    halves = [stored(tmp_path / name, text_of(profile(2))) for name in ("one", "two")]
    comparison = compared([golden], halves)
    found = comparison.candidate.profile
    assert comparison.golden.profile is not None and found is not None
    assert comparison.golden.profile.total == replace(kept.total, peak=GB)
    assert found.total.compute == pytest.approx(2 * profile(2).total.compute)
    assert "over 2 runs" in words_of(comparison)
    again = Verdict.from_json(comparison.to_json())
    assert again.golden == comparison.golden and again.candidate == comparison.candidate
    assert html_of(again) == html_of(comparison)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"before": 0, "stages": {"layers.0": {"compute": 1}}}',
        text_of(profile(1)).replace("1.4", "-1.4"),
        text_of(profile(1)).replace("1.4", "NaN"),
        text_of(profile(1)).replace("1.4", '"1.4"'),
    ],
)
def test_a_damaged_profile_is_a_warning_and_no_more(tmp_path: Path, text: str) -> None:
    golden = stored(tmp_path / "golden", text)
    with pytest.raises(UserError, match="is damaged"):
        RunFolder(tmp_path / "golden").read_profile()
    comparison = compared([golden], [stored(tmp_path / "candidate", None)])
    (said,) = [each for each in warning_lines(comparison) if "is damaged" in each]
    assert PROFILE in said
    assert comparison.golden.profile is None


def test_a_file_in_a_folder_of_dumps_is_nobodys_profile(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    numpy.save(folder / "layers.0.npy", sites()["layers.0:out"].numpy())
    (folder / PROFILE).write_text("not ours")
    (folder / "names.json").write_text(json.dumps({"layers.0": "layers.0:out"}))
    side = RunSet([open_dump(from_folder(folder))])
    assert side.profile is None
    assert not side.cautions


# ---------------------------------------------------------------- the report


def test_both_sides_stand_beside_each_other() -> None:
    words = words_of(BOTH)
    assert "Golden: 45.0 s, most of it (60 %) reference." in words
    assert "Candidate: 10.0 s, most of it (70 %) compute." in words
    assert "reference 27.0 s, 60 % –" in words
    assert "bytes read 4.50 GB 2.50 GB" in words
    assert "read at 1.25 GB/s 1.25 GB/s" in words
    assert "memory at most 1.00 GB 1.00 GB" in words
    assert '<a href="#time">' in html_of(BOTH)
    Page(html_of(BOTH))


def test_markdown_has_the_table_only() -> None:
    text = markdown_of(BOTH)
    section = text.split("## Where the time went\n\n")[1].split("\n\n")[0]
    assert section.splitlines()[:3] == [
        "|  | golden | candidate |",
        "| --- | --- | --- |",
        "| waiting for weights | 1.8 s, 4 % | 1.0 s, 10 % |",
    ]
    assert "<svg" not in text


@pytest.mark.parametrize(("golden", "candidate"), [(profile(), None), (None, profile())])
def test_one_side_alone_has_a_column_of_its_own(
    golden: RunProfile | None, candidate: RunProfile | None
) -> None:
    html = html_of(with_profiles(golden, candidate))
    assert html.count(", by stage</h3>") == 1
    header = "golden" if golden else "candidate"
    assert f"|  | {header} |\n" in markdown_of(with_profiles(golden, candidate))


@pytest.mark.parametrize("nothing", [None, RunProfile()])
def test_without_profiles_there_is_no_section(nothing: RunProfile | None) -> None:
    comparison = with_profiles(nothing, nothing)
    assert "Where the time went" not in html_of(comparison) + markdown_of(comparison)
    assert "#time" not in html_of(comparison)


@pytest.mark.parametrize("layers", [1, 6, 62])
def test_the_figure_fits_a_phone_and_stays_small(layers: int) -> None:
    figure = time_by_stage("golden", profile(layers, reference=3.0))
    (svg,) = ElementTree.fromstring(figure).iter(f"{SVG}svg")
    assert float(svg.attrib["width"]) <= 328 and float(svg.attrib["height"]) <= 400
    bars = {path.get("class", ""): path.get("d", "") for path in svg.iter(f"{SVG}path")}
    drawn = {f"part-{part}" for part in (*PARTS, "read", "convert", "hash")}
    assert drawn <= set(bars)
    assert {bars[name].count("z") for name in drawn} == {layers + 3}
    both = with_profiles(profile(62, reference=3.0), profile(62), 62)
    plain = with_profiles(None, None, 62)
    assert len(html_of(both)) - len(html_of(plain)) < 100_000


def test_what_held_the_run_up_is_above_the_axis_and_what_was_read_meanwhile_below() -> None:
    one = StageProfile(wait=1.0, compute=3.0, loading=Spent(read=2.0, bytes=10))
    figure = ElementTree.fromstring(time_by_stage("golden", RunProfile(0, {"layers.0": one})))
    spans = {}
    for path in figure.iter(f"{SVG}path"):
        shape = re.fullmatch(r"M[\d.]+ ([\d.]+)h[\d.]+v([\d.]+)h-[\d.]+z", path.get("d", ""))
        if shape and path.get("class", "").startswith("part-"):
            top, height = map(float, shape.groups())
            spans[path.get("class")] = (top, top + height)
    (top, seam), (again, axis), (below, foot) = (
        spans[f"part-{part}"] for part in ("compute", "wait", "read")
    )
    assert seam == pytest.approx(again, abs=0.2) and axis == pytest.approx(below, abs=0.2)
    # One scale for all.
    assert (seam - top) / 3 == pytest.approx(axis - again, abs=0.2)
    assert (foot - below) / 2 == pytest.approx(axis - again, abs=0.2)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0123, "12.3 ms"), (0.9999, "1.0 s"), (61.0, "61.0 s"), (450, "7.5 min"), (9000, "2.5 h")],
)
def test_spans_of_time_have_the_unit_a_person_would_use(seconds: float, said: str) -> None:
    assert seconds_text(seconds) == said


def test_the_two_sides_share_a_scale_of_seconds() -> None:
    slow, fast = profile(2, reference=30.0), profile(2, reference=0.0)
    ticks = [
        re.findall(r'text-anchor="end">([^<]+)<', time_by_stage(*sides))
        for sides in (("golden", slow, fast), ("candidate", fast, slow), ("candidate", fast))
    ]
    assert ticks[0] == ticks[1] != ticks[2]
