"""A golden with references, and what the calibrated tolerance makes of candidates, for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Ended
from runs import make_run

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import Exit, UserError
from layerparity.judge.align import align
from layerparity.judge.calibrate import Calibration
from layerparity.judge.conclude import noisier
from layerparity.judge.decide import decide
from layerparity.judge.references import SiteReference
from layerparity.judge.sides import open_side
from layerparity.judge.ties import flips
from layerparity.judge.tolerances.calibrated import CalibratedTolerance, limits_of
from layerparity.numbers.clean_slopes import CleanSlopes
from layerparity.numbers.floor import OFF, Floor
from layerparity.record.folder import MANIFEST, REFERENCE_INDEX, RunFolder
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.references import ISOLATED, StoredReferences
from layerparity.record.verdict import Outcome, Row
from layerparity.report.cautions import caution_text
from layerparity.report.reasons import breach_text

Run = Callable[..., Ended]
HERE = ("backend=gpu", "device_map=cpu", "threads=1")
# What is judged is in float32, fed from the golden, and no component alone.
FLOORS = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
LIMITS = CalibratedTolerance()


def folder_of(tmp_path: Path, kind: str) -> Path:
    """Return the artifacts of the newest run of a kind."""
    found = [
        path.parent
        for path in tmp_path.rglob(MANIFEST)
        if json.loads(path.read_text())["kind"] == kind
    ]
    return max(found, key=lambda path: (path / MANIFEST).stat().st_mtime_ns)


def test_a_golden_holds_wide_values_and_floors_for_two_types(cli: Run, tmp_path: Path) -> None:
    assert cli(*HERE, "scope=single", "layer=0").exit == Exit.OK
    folder = folder_of(tmp_path, "golden")
    stored = StoredReferences(RunFolder(folder), RunFolder(folder).read_manifest().reference)
    site = Site.parse("layers.0.mlp:out")
    entry = stored.find("layers.0", ISOLATED, site)
    assert entry is not None
    assert set(entry.floors) == {"float32", "bfloat16"}
    wide = stored.reference(entry)
    assert wide.dtype is torch.float64
    norm = float(wide.norm())
    narrow, own = (stored.floor(entry, dtype) for dtype in ("bfloat16", "float32"))
    assert narrow is not None and own is not None
    relative = [float(each.tokens.double().sum(1).max().sqrt()) / norm for each in (own, narrow)]
    # One rounding of float32 is 6e-8 and of bfloat16 4e-3: a floor is some of them.
    assert 1e-8 < relative[0] < 3e-6
    assert 1e-3 < relative[1] < 5e-2
    # A float32 golden is off by float32's rounding, which is nearly nothing in the other type.
    assert 0.3 < own.golden_share < OFF and 0 < narrow.golden_share < 0.01


def test_a_golden_without_a_reference_judges_nothing(cli: Run) -> None:
    cli(*HERE, "scope=single", "layer=0", "reference.make=false")
    cli(*HERE, "scope=single", "layer=0", "kind=candidate", "port=clean", "port.name='8 shards'")
    ended = cli("job=compare")
    assert ended.exit == Exit.INCONCLUSIVE
    assert "the golden has no reference to judge by" in ended.out


def test_a_type_without_a_floor_is_inconclusive_and_says_the_key(cli: Run) -> None:
    cli(*HERE, "scope=single", "layer=0", "reference.dtypes=[float32]")
    cli(*HERE, "scope=single", "layer=0", "kind=candidate", "dtype=bfloat16")
    ended = cli("job=compare")
    assert ended.exit == Exit.INCONCLUSIVE
    assert "no noise floor for bfloat16" in ended.out
    assert "reference.dtypes" in ended.out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_passes_and_a_small_slip_fails(cli: Run, dtype: str) -> None:
    cli(*HERE, "scope=single", "layer=0", "capture=components", f"dtype={dtype}")
    again = (*HERE, "scope=single", "layer=0", "capture=components", "kind=candidate")
    cli(*again, "dtype=bfloat16", "port=clean", "port.name='16 shards'", "name=clean")
    assert cli("job=compare", "candidate=clean").exit == Exit.OK
    cli(*again, f"dtype={dtype}", "port=fault", "port.name=qk_norm_averaged", "name=slipped")
    ended = cli("job=compare", "candidate=slipped")
    assert ended.exit == Exit.FAILED
    assert "q_norm" in ended.out


def test_a_chained_candidate_is_judged_by_what_a_clean_chain_becomes(cli: Run) -> None:
    floors = ("reference.dtypes=[float32]", "reference.components=false")
    cli(*HERE, "scope=range", "start=0", "end=2", *floors)
    chained = (*HERE, "scope=range", "start=0", "end=2", "feed=chained", "kind=candidate")
    cli(*chained, "port=clean", "port.name='16 shards'", "name=clean")
    ended = cli("job=compare", "candidate=clean")
    assert ended.exit == Exit.OK, ended.out
    cli(*chained, "port=fault", "port.name=gate_up_swapped", "port.layers=[1]", "name=faulty")
    ended = cli("job=compare", "candidate=faulty")
    assert ended.exit == Exit.FAILED
    assert "layers.1." in ended.out.split("FAIL", 1)[1].splitlines()[0]


def test_decode_steps_are_teacher_forced_and_judged(
    cli: Run, tmp_path: Path, three_blocks: Path
) -> None:
    steps = ("generate.max_new_tokens=3", "model=checkpoint", f"model.path={three_blocks}")
    cli(*HERE, "scope=full", *steps, *FLOORS)
    cli(*HERE, "scope=full", *steps, "kind=candidate", "port=clean", "port.name='8 shards'")
    manifest = RunFolder(folder_of(tmp_path, "candidate")).read_manifest()
    decoded = {str(feed.site): feed.source for feed in manifest.feeds if feed.site.step == 2}
    assert decoded["layers.2:in@decode.2"] == "golden"
    assert decoded["embed_tokens:in@decode.2"] == "golden"
    held = {str(record.site) for record in manifest.records}
    assert {"layers.2.mlp:out@decode.1", "tokens:out@decode.2"} <= held
    ended = cli("job=compare")
    assert ended.exit == Exit.OK, ended.out


def test_isolated_generation_wants_a_golden_that_went_as_far(cli: Run, three_blocks: Path) -> None:
    shared = (*HERE, "scope=full", "model=checkpoint", f"model.path={three_blocks}")
    cli(*shared, "generate.max_new_tokens=2", "reference.make=false")
    ended = cli(*shared, "generate.max_new_tokens=4", "kind=candidate", "feed=isolated")
    assert ended.exit == Exit.USER
    assert "generate.max_new_tokens=4" in ended.err


def test_an_altered_reference_is_refused(cli: Run, tmp_path: Path) -> None:
    cli(*HERE, "scope=single", "layer=0", *FLOORS)
    folder = folder_of(tmp_path, "golden")
    index = folder / REFERENCE_INDEX
    index.write_text(index.read_text().replace('"eager"', '"other"'))
    with pytest.raises(UserError, match="make the run again"):
        StoredReferences(RunFolder(folder), RunFolder(folder).read_manifest().reference)


def test_damaged_reference_values_are_refused(cli: Run, tmp_path: Path) -> None:
    cli(*HERE, "scope=single", "layer=0")
    folder = folder_of(tmp_path, "golden")
    stored = StoredReferences(RunFolder(folder), RunFolder(folder).read_manifest().reference)
    entry = stored.find("layers.0", ISOLATED, Site.parse("layers.0.mlp:out"))
    assert entry is not None
    path = folder / entry.file
    raw = bytearray(path.read_bytes())
    raw[-5:] = bytes(255 - byte for byte in raw[-5:])
    path.write_bytes(bytes(raw))
    with pytest.raises(UserError, match="make the run again"):
        for each in stored.entries():
            stored.reference(each)
            stored.floor(each, "bfloat16")
            stored.floor(each, "float32")


def scores(values: torch.Tensor, noise: float) -> SiteReference:
    """Return scores [tokens, experts] whose clean evaluations differ by ``noise`` (RMS)."""
    tokens = torch.full((1, values.shape[0]), noise**2 * values.shape[1])
    return SiteReference(
        values, Floor(("way",), tokens, torch.ones(1, values.shape[1])), CleanSlopes(), ISOLATED
    )


@pytest.mark.parametrize("name", ["slope_token", "slope_token_head"])
def test_factors_of_tokens_fail_where_they_matter_and_clean_ways_show_none(name: str) -> None:
    clean = {"error_ratio": 0.9, "norm_ratio": 1.0}
    assert not LIMITS.breaches(Kind.REAL, {**clean, name: 0.0001, f"{name}_ratio": 50.0})
    assert not LIMITS.breaches(Kind.REAL, {**clean, name: 0.01, f"{name}_ratio": 1.3})
    metrics = {**clean, name: 0.0012, f"{name}_ratio": 3.4}
    (said,) = LIMITS.breaches(Kind.REAL, metrics)
    whose = "each head of a token" if name.endswith("head") else "each token"
    assert breach_text(said, metrics) == (
        f"{whose} has a factor of its own, off by 0.12 % (RMS), 3.4 times what clean computations "
        "show"
    )


def test_a_token_fails_that_stands_out_and_is_past_its_floor() -> None:
    clean = {"error_ratio": 0.9, "norm_ratio": 1.0, "outlier_index": 11.0}
    assert not LIMITS.breaches(Kind.REAL, {**clean, "outlier": 1.5, "outlier_z": 30.0})
    assert not LIMITS.breaches(Kind.REAL, {**clean, "outlier": 7.9, "outlier_z": 5.84})
    metrics = {**clean, "outlier": 3.1, "outlier_z": 8.1}
    (said,) = LIMITS.breaches(Kind.REAL, metrics)
    assert (said.metric, said.group) == ("outlier", 11)
    assert breach_text(said, metrics).startswith("the error of token 11 stands out: 3.1 times")


def test_a_candidate_that_is_noisier_in_every_block_is_told() -> None:
    def rows(*ratios: float, local: str = "mlp:out") -> list[Row]:
        return [
            Row(
                Site.inside(layer, local),
                Kind.REAL,
                Outcome.PASS,
                metrics={"error_ratio": 0.5 * ratio, "golden_error_ratio": 0.5},
            )
            for layer, ratio in enumerate(ratios)
        ]

    same = (["bfloat16"], ["bfloat16"])
    assert noisier(rows(1.5, 1.1, 1.4), *same) == []
    assert noisier(rows(1.5), *same) == []
    assert noisier(rows(9.0, 9.0), ["float32"], ["bfloat16"]) == []
    # What fails is a bug, and no noise.
    first, *others = rows(1e6, 1.3, 1.4)
    assert noisier([replace(first, outcome=Outcome.FAIL), *others], *same) == []
    (found,) = noisier([*rows(1.1, 1.3, local=":in"), *rows(1.5, 1.3, 1.4)], *same)
    assert found.values == {"site": "mlp:out", "blocks": 3, "times": pytest.approx(1.3)}
    assert "at least 1.30 times the golden's in all 3 blocks" in caution_text(found)


def test_a_flip_at_a_tie_is_noise_and_another_is_not() -> None:
    values = torch.tensor([[0.9, 0.5, 0.4999, 0.1], [0.9, 0.5, 0.4, 0.1]])
    golden = torch.tensor([[0, 1], [0, 1]])
    candidate = torch.tensor([[0, 2], [0, 2]])
    found = flips(golden, candidate, scores(values, 1e-4), torch.ones(2, dtype=torch.bool))
    assert found["flips"] == 2
    assert found["flips_outside_noise"] == 1
    assert LIMITS.breaches(Kind.INDEX_SET, found)
    tied = flips(golden[:1], candidate[:1], scores(values[:1], 1e-4), torch.ones(1).bool())
    assert tied["flips_outside_noise"] == 0
    assert not LIMITS.breaches(Kind.INDEX_SET, tied)


def test_a_flip_at_a_tie_of_groups_is_noise_and_one_into_another_group_is_not() -> None:
    """Two groups of two experts: the reference chooses from the first, at the first token nearly
    from the other."""
    values = torch.tensor([[0.9, 0.5, 0.0, 0.0], [0.9, 0.5, 0.0, 0.0]])
    groups = torch.tensor([[1.4, 1.3999], [1.4, 1.1]])
    golden, candidate = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[2, 3], [2, 3]])
    real = torch.ones(2, dtype=torch.bool)
    found = flips(golden, candidate, scores(values, 1e-4), real, scores(groups, 1e-4))
    assert (found["flips"], found["flips_outside_noise"]) == (2, 1)
    assert found["tie_margin"] == pytest.approx(1e-4, rel=1e-2)
    within = torch.tensor([[0, 3], [0, 3]])
    assert flips(golden, within, scores(values, 1e-4), real)["flips_outside_noise"] == 2


def test_padding_flips_count_for_nothing() -> None:
    values = torch.tensor([[0.9, 0.5, 0.1, 0.0]])
    chosen = torch.tensor([[0, 1]])
    other = torch.tensor([[2, 3]])
    found = flips(chosen, other, scores(values, 1e-4), torch.zeros(1, dtype=torch.bool))
    assert found["flips"] == 0


def test_without_a_ratio_a_site_is_inconclusive_and_equality_still_decides() -> None:
    metrics = {"rel_l2": 0.0, "nonfinite_disagreement": 0.0}
    assert decide(Kind.REAL, metrics, LIMITS) == (
        Outcome.INCONCLUSIVE,
        (),
        Reason(ReasonKind.ROUNDING_UNKNOWN),
    )
    assert decide(Kind.EXACT, {"unequal": 0.0}, LIMITS)[0] is Outcome.PASS
    broken = {**metrics, "nonfinite_disagreement": 3.0}
    assert decide(Kind.REAL, broken, LIMITS)[0] is Outcome.FAIL


def test_a_slope_fails_only_where_it_is_significant_and_matters() -> None:
    clean = {"error_ratio": 0.9}
    assert not LIMITS.breaches(Kind.REAL, {**clean, "slope": 0.01, "slope_z": 1.0})
    assert not LIMITS.breaches(Kind.REAL, {**clean, "slope": 0.0001, "slope_z": 50.0})
    (said,) = LIMITS.breaches(Kind.REAL, {**clean, "slope": 0.003, "slope_z": 50.0})
    assert "+0.3 %" in breach_text(said, clean)


def test_a_wrong_size_fails_beside_the_ratio_unless_the_floor_is_wider() -> None:
    clean = {"error_ratio": 0.9, "floor_rel_l2": 0.003}
    assert not LIMITS.breaches(Kind.REAL, {**clean, "norm_ratio": 1.01})
    (said,) = LIMITS.breaches(Kind.REAL, {**clean, "norm_ratio": 0.95})
    assert "norm is off by 5 %" in breach_text(said, clean)
    assert not LIMITS.breaches(Kind.REAL, {**clean, "norm_ratio": 0.95, "floor_rel_l2": 0.05})
    assert not LIMITS.breaches(Kind.REAL, {**clean, "norm_ratio": float("nan")})
    assert not LIMITS.breaches(Kind.REAL, {**clean, "norm_ratio": 0.9, "agreeing_tokens": 0.99})


def test_calibrated_limits_stand_above_what_was_seen() -> None:
    rows = [
        Row(Site.parse("layers.0.mlp:out"), Kind.REAL, Outcome.PASS, metrics={"error_ratio": ratio})
        for ratio in (0.8, 1.2)
    ]
    assert limits_of(rows, 1.5) == {"error_ratio": pytest.approx(1.8)}
    assert limits_of(rows[:1], 1.0) == {"error_ratio": LIMITS.error_ratio / 2}
    assert limits_of([], 1.5) == {}


def test_a_calibration_is_used_by_later_comparisons(cli: Run, tmp_path: Path) -> None:
    cli(*HERE, "scope=single", "layer=0")
    cli(*HERE, "scope=single", "layer=0", "kind=candidate", "port=clean", "port.name='8 shards'")
    assert cli("job=compare", "name=good").exit == Exit.OK
    kept = cli("job=calibrate", "job.runs=[good]")
    assert kept.exit == Exit.OK, kept.err
    ended = cli("job=compare")
    assert "calibrated for this model" in ended.out
    assert "calibrated for this model" not in cli("job=compare", "tolerance.calibration=null").out
    (limits,) = tmp_path.rglob("limits.json")
    limits.write_text(limits.read_text().replace(": ", ": 9"))
    ended = cli("job=compare")
    assert ended.exit == Exit.USER, ended.out
    assert "is damaged (it is not the one that the run wrote): calibrate again." in ended.err


def test_a_comparison_that_fails_gives_no_limits(cli: Run) -> None:
    shared = (*HERE, "scope=single", "layer=0")
    cli(*shared, *FLOORS)
    cli(*shared, "kind=candidate", "port=fault", "port.name=gate_up_swapped")
    assert cli("job=compare", "name=bad").exit == Exit.FAILED
    ended = cli("job=calibrate", "job.runs=[bad]")
    assert ended.exit == Exit.USER, ended.out
    assert "'bad'" in ended.err
    assert "fails at layers.0.mlp" in ended.err
    assert "job=judge run=" in ended.err
    assert "calibrated for this model" not in cli("job=compare").out


def test_a_calibration_wants_comparisons(cli: Run) -> None:
    ended = cli("job=calibrate")
    assert ended.exit == Exit.USER
    assert "job.runs=" in ended.err


def test_a_block_without_heads_borrows_none_of_anothers(tmp_path: Path) -> None:
    """Linear attention beside full attention: its floor was measured without heads."""
    value, heads = torch.randn(1, 4, 8), torch.randn(1, 4, 2, 4)
    tensors = {
        "layers.0.self_attn.q_proj:out": value,
        "layers.1.self_attn.q_proj:out": value,
        "layers.1.self_attn:q_rotated": heads,
    }
    axes = {"layers.1.self_attn:q_rotated": ("batch", "token", "head", "channel")}
    run = make_run(tmp_path / "run", tensors, axes=axes)
    golden = open_side("golden", [run])
    calibration = Calibration(golden, golden, Blocks())
    layouts = {
        str(pair.site): calibration.layout(pair).heads
        for pair in align(golden, golden, Blocks()).pairs
    }
    assert layouts == dict(zip(tensors, (0, 2, 2), strict=True))
