"""Comparing stored runs: what is refused, how it is judged, and that all sites are counted."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import MODEL, STAGES, make_run, sites
from safetensors.torch import save_file

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind
from layerparity.ground.errors import Exit, UserError
from layerparity.judge.choose import newest_pair, obstacle
from layerparity.judge.conclude import conclude
from layerparity.judge.decide import decide
from layerparity.judge.tolerances.fixed import FixedTolerance, Settings
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import SitePatterns
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.cautions import warning_lines
from layerparity.report.headline import run_text, whole_model
from layerparity.report.reasons import breach_text
from layerparity.report.reasons import reason as why
from layerparity.report.refusals import obstacles_in_words, passed_over_text

BLOCKS = ("layers.0", "layers.1")
SERIAL_BLOCKS = Blocks(usual=SERIAL)
HEADS = ("batch", "head", "token", "channel")


def compare(golden: StoredRun, *candidates: StoredRun) -> Verdict:
    with obstacles_in_words():
        return conclude([golden], candidates, FixedTolerance())


def row(comparison: Verdict, site: str) -> Row:
    return next(each for each in comparison.rows if str(each.site) == site)


def within(stages: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    paths = tuple(f"{stage}{mark}" for stage in stages for mark in ":.")
    return {site: tensor for site, tensor in tensors.items() if site.startswith(paths)}


@pytest.fixture
def golden(tmp_path: Path) -> StoredRun:
    return make_run(tmp_path / "golden", sites())


def isolated(folder: Path, *stages: str, **manifest: Any) -> StoredRun:
    """A candidate of some blocks, each fed the golden's own input."""
    tensors = within(stages, sites())
    return make_run(folder, tensors, stages=stages, feed="isolated", **manifest)


# Passing and failing


def test_the_same_run_twice_passes_everywhere(golden: StoredRun, tmp_path: Path) -> None:
    found = compare(golden, make_run(tmp_path / "candidate", sites()))
    assert {each.outcome for each in found.rows} == {Outcome.PASS}
    assert found.exit is Exit.OK
    assert found.total == len(found.rows) == len(sites())
    assert whole_model(found) == "pass; not exercised: decode steps"
    assert row(found, "layers.0.mlp:out").metrics["rel_l2"] == 0
    assert [each.site for each in found.rows] == SERIAL_BLOCKS.sorted(r.site for r in found.rows)
    assert not found.cautions


def test_a_comparison_survives_json(golden: StoredRun, tmp_path: Path) -> None:
    found = compare(golden, make_run(tmp_path / "candidate", sites()))
    again = Verdict.from_json(found.to_json())
    assert again == found
    assert (again.tolerance, again.limits["max_abs_diff"]) == ("fixed", 0.01)
    assert (again.golden.name, again.golden.scope) == ("golden", "full")


def test_a_wrong_component_fails_and_is_named_first(golden: StoredRun, tmp_path: Path) -> None:
    tensors = sites()
    tensors["layers.1.self_attn:out"] = tensors["layers.1.self_attn:out"] + 0.4
    found = compare(golden, make_run(tmp_path / "candidate", tensors))
    failed = row(found, "layers.1.self_attn:out")
    assert failed.outcome is Outcome.FAIL
    assert "max_abs_diff 0.4 is not under 0.01, 40 times it" in why(failed)
    assert found.where == "layers.1.self_attn:out"
    assert found.exit is Exit.FAILED
    assert whole_model(found).startswith("fail, 2 of 2 blocks")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_or_inf_in_the_candidate_fails(golden: StoredRun, tmp_path: Path, value: float) -> None:
    tensors = sites()
    tensors["layers.0.mlp:out"][0, 3, 0] = value
    found = compare(golden, make_run(tmp_path / "candidate", tensors))
    failed = row(found, "layers.0.mlp:out")
    assert failed.outcome is Outcome.FAIL
    assert why(failed) == "1 values are NaN or Inf on one side only"
    assert found.token_errors["layers.0.mlp:out"].count(math.inf) == 1


def test_nan_in_the_golden_is_refused(golden: StoredRun, tmp_path: Path) -> None:
    tensors = sites()
    tensors["layers.0.mlp:out"][0, 0, :2] = torch.tensor([math.nan, math.inf])
    broken = make_run(tmp_path / "broken", tensors)
    with pytest.raises(
        UserError, match=r"'broken' has 2 NaN or Inf at layers.0.mlp:out.*new golden"
    ):
        compare(broken, golden)


def test_progress_is_told(golden: StoredRun, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    other = make_run(tmp_path / "candidate", sites())
    conclude([golden], [other], FixedTolerance(), progress=lambda *told: seen.append(told))
    count = len(sites())
    assert seen[0] == (0, count, "embed_tokens:in")
    assert seen[-1] == (count, count, "")


# Padding


def test_padded_tokens_enter_nothing(tmp_path: Path) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    left, right = sites(), sites()
    for tensors, filler in ((left, 1e4), (right, math.nan)):
        for site, tensor in tensors.items():
            if not site.startswith("embed_tokens") and tensor.is_floating_point():
                # A cloned tensor: a block's input shares its memory with the output before it.
                tensors[site] = tensor.clone()
                tensors[site][0, :2] = filler
    right["layers.0.mlp.gate:choices"][0, 0] = torch.tensor([1, 3])
    fed = {site: tensor for site, tensor in left.items() if site.endswith(":in")}
    golden = make_run(tmp_path / "golden", left, mask=mask)
    found = compare(golden, make_run(tmp_path / "candidate", right, mask=mask, fed=fed))
    assert found.exit is Exit.OK, [each for each in found.rows if why(each)]
    assert len(found.token_errors["layers.0:out"]) == 8
    assert len(found.token_errors["layers.0.mlp.gate:logits"]) == 8


def test_padding_is_found_by_the_name_of_the_axis(tmp_path: Path) -> None:
    mask = torch.tensor([[0, 1, 1]])
    site = "layers.0.self_attn:q_rotated"
    left = {"layers.0:in": torch.ones(1, 3, 8), site: torch.randn(1, 4, 3, 2)}
    right = {**left, site: left[site].clone()}
    right[site][:, :, 0] = 99.0
    right[site][:, 2, 1] += 0.5
    runs = [
        make_run(tmp_path / str(n), each, mask=mask, axes={site: HEADS}, stages=("layers.0",))
        for n, each in enumerate((left, right))
    ]
    found = compare(*runs)
    assert row(found, site).metrics["max_abs_diff"] == pytest.approx(0.5)
    expected = (right[site] - left[site]).transpose(1, 2).flatten(2).norm(dim=-1)
    errors = expected / left[site].transpose(1, 2).flatten(2).norm(dim=-1)
    assert found.token_errors[site] == pytest.approx(errors[0, 1:].tolist(), rel=1e-4)


def test_a_mask_that_does_not_fit_is_inconclusive(golden: StoredRun, tmp_path: Path) -> None:
    odd, even = (
        make_run(tmp_path / name, sites(), mask=torch.ones(2, 3)) for name in ("odd", "even")
    )
    found = compare(odd, even)
    assert why(row(found, "norm:out")) == "attention mask [2, 3] against [2, 5, 8]"


def test_a_long_tensor_is_compared_in_pieces(tmp_path: Path) -> None:
    left = {"layers.0:in": torch.zeros(1), "layers.0.mlp:out": torch.randn(3, 40, 1000)}
    right = {**left, "layers.0.mlp:out": left["layers.0.mlp:out"] + 1e-4}
    runs = [
        make_run(tmp_path / str(n), each, stages=("layers.0",))
        for n, each in enumerate((left, right))
    ]
    found = row(compare(*runs), "layers.0.mlp:out").metrics
    assert found["mean_abs_diff"] == pytest.approx(1e-4, rel=1e-3)
    assert len(compare(*runs).token_errors["layers.0.mlp:out"]) == 120


# Routing


def test_a_flip_fails_and_its_token_leaves_the_weights_alone(
    golden: StoredRun, tmp_path: Path
) -> None:
    tensors = sites()
    tensors["layers.0.mlp.gate:choices"][1, 2] = torch.tensor([0, 3])
    tensors["layers.0.mlp.gate:weights"][1, 2] = 7.0
    tensors["layers.0.mlp.gate:choices"][0, 0] = torch.tensor([2, 0])
    found = compare(golden, make_run(tmp_path / "candidate", tensors))
    choices = row(found, "layers.0.mlp.gate:choices")
    assert choices.metrics == {"set_agreement": 0.9}
    assert (choices.outcome, why(choices)) == (
        Outcome.FAIL,
        "what is chosen differs at 10 % of the tokens",
    )
    assert row(found, "layers.0.mlp.gate:weights").outcome is Outcome.PASS


def test_weights_without_one_agreeing_token_are_inconclusive(
    golden: StoredRun, tmp_path: Path
) -> None:
    tensors = sites()
    tensors["layers.1.mlp.gate:choices"][:] = torch.tensor([1, 3])
    found = compare(golden, make_run(tmp_path / "candidate", tensors))
    weights = row(found, "layers.1.mlp.gate:weights")
    assert (weights.outcome, why(weights)) == (
        Outcome.INCONCLUSIVE,
        "no token's expert set agrees",
    )


# Exact sites


def test_the_embedding_is_judged_by_equality(golden: StoredRun, tmp_path: Path) -> None:
    tensors = sites()
    changed = tensors["embed_tokens:out"] * (1 + 1e-6)
    found = compare(
        golden, make_run(tmp_path / "candidate", {**tensors, "embed_tokens:out": changed})
    )
    failed = row(found, "embed_tokens:out")
    assert failed.outcome is Outcome.FAIL
    assert "not equal to the bit" in why(failed)


def test_what_an_isolated_block_was_fed_is_exact(golden: StoredRun, tmp_path: Path) -> None:
    site = "layers.1:in"
    tensors = within(("layers.1",), sites())
    fed = {site: tensors[site]}
    tensors[site] = tensors[site] + 1e-6
    found = compare(
        golden,
        make_run(tmp_path / "c", tensors, stages=("layers.1",), feed="isolated", fed=fed),
    )
    assert row(found, site).kind is Kind.EXACT
    assert row(found, site).outcome is Outcome.FAIL
    chained = make_run(tmp_path / "chained", {**sites(), site: tensors[site]})
    assert row(compare(golden, chained), site).outcome is Outcome.PASS


def test_a_narrower_candidate_is_fed_the_goldens_values_rounded(
    golden: StoredRun, tmp_path: Path
) -> None:
    tensors = within(("layers.0",), sites())
    fed = {"layers.0:in": tensors["layers.0:in"]}
    narrow = {**tensors, "layers.0:in": tensors["layers.0:in"].bfloat16()}
    found = compare(
        golden, make_run(tmp_path / "c", narrow, stages=("layers.0",), feed="isolated", fed=fed)
    )
    assert row(found, "layers.0:in").outcome is Outcome.PASS


# Refusals


def test_unfinished_runs_are_refused(golden: StoredRun) -> None:
    with pytest.raises(UserError, match=r"'golden' is running; .* wait for it"):
        compare(golden, replace(golden, status="RUNNING"))
    with pytest.raises(UserError, match=r"'golden' is failed; .* run it again"):
        compare(replace(golden, status="FAILED"), golden)


def test_a_run_is_not_compared_with_itself(golden: StoredRun, tmp_path: Path) -> None:
    said = "'golden' is on both sides.*proves nothing: give another as golden= or candidate="
    with pytest.raises(UserError, match=said):
        compare(golden, golden)
    with pytest.raises(UserError, match=said):
        compare(golden, make_run(tmp_path / "c", sites()), golden)
    assert "on both sides" in str(obstacle([golden], [golden], in_full=False))


def test_why_runs_are_passed_over_is_said(golden: StoredRun, tmp_path: Path) -> None:
    first = ("embed_tokens", "layers.0")
    part = make_run(tmp_path / "part", within(first, sites()), stages=first)
    whole = make_run(tmp_path / "whole", sites())
    _, _, (passed_over,) = newest_pair([[part], [golden]], [[whole]])
    said = passed_over_text(passed_over)
    assert said.startswith("whole (") and " does not fit part (" in said
    assert said.endswith("): layers.1:in: the golden did not run this part of the model")
    weights = {stage: {f"{stage}.w": "2"} for stage in STAGES}
    other = make_run(tmp_path / "other", sites(), weights=weights)
    said = (
        r"^other \(.*\) does not fit golden \(.*\): No site of 'golden' and 'other' .* these differ"
    )
    with pytest.raises(UserError, match=said), obstacles_in_words():
        newest_pair([[golden]], [[other]])


def test_a_golden_by_transformers_is_taken_before_a_newer_and_fuller_one(tmp_path: Path) -> None:
    first = ("embed_tokens", "layers.0")
    ours = [make_run(tmp_path / "ours", within(first, sites()), stages=first)]
    run, judged = make_run(tmp_path / "own", sites()), [make_run(tmp_path / "judged", sites())]
    own = [replace(run, tags={**run.tags, "port": "mine.Port"})]
    assert newest_pair([own, ours], [judged])[0] is ours
    assert newest_pair([own], [judged])[0] is own


def test_a_golden_of_the_same_model_is_taken_before_a_newer_one(tmp_path: Path) -> None:
    def called(name: str, model: str) -> list[StoredRun]:
        run = make_run(tmp_path / name, sites())
        return [replace(run, tags={**run.tags, "model": model})]

    ours, theirs, judged = called("ours", "v1"), called("theirs", "v2"), called("judged", "v1")
    assert newest_pair([theirs, ours], [judged])[0] is ours
    assert newest_pair([theirs], [judged])[0] is theirs, "the weights decide, not the name"


def test_two_runs_of_one_experiment_are_said(tmp_path: Path) -> None:
    def made(name: str, kind: str, torch_version: str, **manifest: Any) -> StoredRun:
        run = make_run(tmp_path / name, sites(), kind=kind, **manifest)
        return replace(run, tags={"version.torch": torch_version})

    one, same = made("one", "golden", "2.9"), made("same", "candidate", "2.9")
    (warning,) = warning_lines(compare(one, same))
    assert warning.startswith("Both sides are the same experiment (gpu on cpu, port hf, float32")
    others = [
        made("newer", "candidate", "2.10"),
        made("other", "candidate", "2.9", backend="neuron"),
        made("eager", "candidate", "2.9", numerics={"attn": "eager"}),
        make_run(tmp_path / "unknown", sites()),
    ]
    assert [compare(one, other).cautions for other in others] == [(), (), (), ()]
    twin = make_run(tmp_path / "twin", sites(), fingerprint=str(others[-1].folder))
    assert "same experiment" in warning_lines(compare(others[-1], twin))[0]


def test_observing_other_sites_may_not_change_what_is_computed(tmp_path: Path) -> None:
    few = SitePatterns("blocks", (":out",))

    def seen(name: str, changed: float, capture: SitePatterns) -> list[str]:
        tensors = sites()
        tensors["layers.1:out"] = tensors["layers.1:out"] + changed
        run = make_run(tmp_path / name, tensors, kind="candidate", capture=capture)
        return warning_lines(compare(golden, replace(run, tags=golden.tags)))

    golden = make_run(tmp_path / "golden", sites())
    golden = replace(golden, tags={"version.torch": "2.9"})
    (warning,) = seen("changed", 1e-6, few)
    assert "yet layers.1:out is not equal to the bit (1 such): observing changes" in warning
    assert "same experiment" in seen("equal", 0.0, few)[0]
    own = RunFolder(golden.folder).read_manifest().capture
    assert "same experiment" in seen("alike", 1e-6, own)[0]


def test_no_run_at_all_is_refused(golden: StoredRun) -> None:
    with pytest.raises(UserError, match="no candidate run to compare: make one"):
        conclude([golden], [], FixedTolerance())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": replace(MODEL, model_type="llama")}, "model .minimax_m2 against llama"),
        ({"model": replace(MODEL, config_digest="x")}, "model configuration"),
        ({"inputs": {"token_ids": "other"}}, "inputs .token_ids"),
    ],
)
def test_strangers_are_refused(
    golden: StoredRun, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    other = make_run(tmp_path / "other", sites(), **changed)
    with pytest.raises(UserError, match=f"'golden' and 'other' cannot be compared: {named}"):
        compare(golden, other)


def test_other_weights_make_their_block_and_what_follows_inconclusive(
    golden: StoredRun, tmp_path: Path
) -> None:
    weights = {"layers.1": {"layers.1.w": "2"}}
    found = compare(golden, make_run(tmp_path / "candidate", sites(), weights=weights))
    reason = "not the same start: weights of layers.1 (layers.1.w)"
    for site in ("layers.1.mlp:out", "norm:out", "lm_head:out"):
        assert (row(found, site).outcome, why(row(found, site))) == (Outcome.INCONCLUSIVE, reason)
    assert row(found, "layers.0:out").outcome is Outcome.PASS
    assert found.exit is Exit.INCONCLUSIVE


def test_other_weights_everywhere_are_refused(golden: StoredRun, tmp_path: Path) -> None:
    weights = {stage: {f"{stage}.w": "2"} for stage in STAGES}
    other = make_run(tmp_path / "other", sites(), weights=weights)
    with pytest.raises(
        UserError, match=r"No site of 'golden' and 'other'.*weights of embed_tokens"
    ):
        compare(golden, other)


def test_another_feed_is_refused_by_name(golden: StoredRun, tmp_path: Path) -> None:
    fed = {"layers.1:in": torch.ones(2, 5, 8)}
    tensors = within(("layers.1",), sites())
    other = make_run(tmp_path / "o", tensors, stages=("layers.1",), feed="isolated", fed=fed)
    with pytest.raises(UserError, match=r"fed different values at layers.1:in"):
        compare(golden, other)


def test_one_wrong_feed_of_two_leaves_the_other_block_judged(
    golden: StoredRun, tmp_path: Path
) -> None:
    fed = {"layers.1:in": torch.ones(2, 5, 8)}
    tensors = within(BLOCKS, sites())
    found = compare(
        golden, make_run(tmp_path / "c", tensors, stages=BLOCKS, feed="isolated", fed=fed)
    )
    assert row(found, "layers.0.mlp:out").outcome is Outcome.PASS
    assert "fed different values" in why(row(found, "layers.1.mlp:out"))
    assert found.outcome is Outcome.INCONCLUSIVE


def test_a_chain_starts_where_it_was_fed(golden: StoredRun, tmp_path: Path) -> None:
    tensors = within(BLOCKS, sites())
    # Fed the golden's input of layer 0, then chained with an error of its own.
    tensors["layers.1:in"] = tensors["layers.1:in"] + 1e-4
    found = compare(golden, make_run(tmp_path / "c", tensors, stages=BLOCKS))
    assert row(found, "layers.1.mlp:out").outcome is Outcome.PASS
    assert row(found, "layers.1:in").kind is Kind.REAL


def test_an_isolated_golden_proves_a_chain_only_as_far_as_it_made_it(tmp_path: Path) -> None:
    tensors = within(BLOCKS, sites())
    chained = make_run(tmp_path / "c", tensors, stages=BLOCKS)
    # The golden's layer 1 was fed what its own layer 0 gave.
    whole = make_run(tmp_path / "whole", tensors, stages=BLOCKS, feed="isolated")
    assert compare(whole, chained).exit is Exit.OK
    foreign = {"layers.1:in": torch.ones(2, 5, 8)}
    fed = {"layers.0:in": tensors["layers.0:in"], **foreign}
    apart = make_run(tmp_path / "apart", tensors, stages=BLOCKS, feed="isolated", fed=fed)
    found = compare(apart, chained)
    reason = why(row(found, "layers.1.mlp:out"))
    assert "the golden's chain starts at layers.1:in" in reason
    assert "the candidate's at layers.0:in" in reason
    assert row(found, "layers.1.mlp:out").outcome is Outcome.INCONCLUSIVE
    assert row(found, "layers.0.mlp:out").outcome is Outcome.PASS


def test_a_golden_of_several_runs_must_be_one_chain(tmp_path: Path) -> None:
    first = make_run(tmp_path / "0", within(("layers.0",), sites()), stages=("layers.0",))
    late = within(("layers.1",), sites())
    fed = {"layers.1:in": torch.ones(2, 5, 8)}
    second = make_run(tmp_path / "1", late, stages=("layers.1",), feed="isolated", fed=fed)
    candidate = make_run(tmp_path / "c", within(BLOCKS, sites()), stages=BLOCKS)
    found = conclude([first, second], [candidate], FixedTolerance())
    reason = why(row(found, "layers.1.mlp:out"))
    assert "the golden's chain starts at layers.1:in" in reason and "from outside" in reason
    # The other way round, a candidate that was fed the golden's own values in the middle.
    isolated_1 = make_run(tmp_path / "i", late, stages=("layers.1",), feed="isolated")
    assert compare(candidate, isolated_1).exit is Exit.OK


def test_other_weights_in_the_chain_of_another_golden_run_count(tmp_path: Path) -> None:
    weights = {"layers.0": {"layers.0.w": "2"}}
    first = within(("layers.0",), sites())
    parts = [
        make_run(tmp_path / "0", first, stages=("layers.0",), weights=weights),
        make_run(tmp_path / "1", within(("layers.1",), sites()), stages=("layers.1",)),
    ]
    candidate = make_run(tmp_path / "c", within(BLOCKS, sites()), stages=BLOCKS)
    said = r"these differ: weights of layers.0 \(layers.0.w\)\. Make"
    with pytest.raises(UserError, match=said), obstacles_in_words():
        conclude(parts, [candidate], FixedTolerance())
    late = {"layers.1": {"layers.1.w": "2"}}
    parts = [
        make_run(tmp_path / "2", first, stages=("layers.0",)),
        make_run(
            tmp_path / "3", within(("layers.1",), sites()), stages=("layers.1",), weights=late
        ),
    ]
    found = conclude(parts, [candidate], FixedTolerance())
    assert "weights of layers.1 (layers.1.w)" in why(row(found, "layers.1.mlp:out"))


def test_a_golden_without_the_fed_site_proves_nothing(tmp_path: Path) -> None:
    tensors = within(("layers.1",), sites())
    del tensors["layers.1:in"]
    late = make_run(tmp_path / "late", tensors, stages=("layers.1",), feeds=[])
    whole = make_run(tmp_path / "whole", within(BLOCKS, sites()), stages=BLOCKS)
    with pytest.raises(UserError, match=r"the golden does not hold layers.0:in"):
        compare(late, whole)
    with pytest.raises(UserError, match=r"nothing says what layers.1 was fed"):
        compare(whole, late)


def test_no_site_in_common(golden: StoredRun, tmp_path: Path) -> None:
    left = make_run(tmp_path / "l", within(("layers.0",), sites()), stages=("layers.0",))
    right = isolated(tmp_path / "r", "layers.1")
    with pytest.raises(UserError, match="'l' and 'r' share no site"):
        compare(left, right)


def test_a_tampered_tensor_is_found(golden: StoredRun, tmp_path: Path) -> None:
    candidate = make_run(tmp_path / "candidate", sites())
    record = next(
        r
        for r in RunFolder(candidate.folder).read_manifest().records
        if str(r.site) == "layers.1.mlp:out"
    )
    path = candidate.folder / record.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = rf"{path} is damaged \(layers.1.mlp:out: .* not those the manifest lists\): make the run"
    with pytest.raises(UserError, match=said):
        compare(golden, candidate)


@pytest.mark.parametrize("how", ["cut", "gone", "renamed", "outside"])
def test_damaged_files_are_said(golden: StoredRun, tmp_path: Path, how: str) -> None:
    candidate = make_run(tmp_path / "candidate", sites())
    path = candidate.folder / "tensors/norm.out.0.safetensors"
    manifest = candidate.folder / "manifest.json"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    elif how == "gone":
        path.unlink()
    elif how == "renamed":
        save_file({"other": torch.zeros(1)}, path)
    else:
        manifest.write_text(manifest.read_text().replace("tensors/norm", "../tensors/norm"))
    with pytest.raises(UserError, match=r"is damaged \(|is missing: |outside its folder"):
        compare(golden, candidate)


def test_a_folder_without_manifest_or_map(golden: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"neither manifest.json.* nor names.json.*layer_\{n\}_output"
    ):
        compare(golden, from_folder(tmp_path / "empty"))


# Coverage


def test_every_absent_site_is_accounted_for(golden: StoredRun, tmp_path: Path) -> None:
    tensors = sites()
    del tensors["layers.0.mlp:out"], tensors["layers.1.mlp:out"]
    tensors["layers.0.mlp.experts:out"] = torch.zeros(2, 5, 8)
    skipped = {"layers.1.mlp:out": "fused", "layers.1.self_attn:q_rotated": "not observable"}
    found = compare(golden, make_run(tmp_path / "candidate", tensors, skipped=skipped))
    ends = {str(each.site): (each.outcome, why(each)) for each in found.rows}
    assert ends["layers.0.mlp:out"][0] is Outcome.MISSING
    assert ends["layers.1.mlp:out"] == (Outcome.SKIPPED, "fused")
    assert ends["layers.1.self_attn:q_rotated"] == (Outcome.SKIPPED, "not observable")
    assert ends["layers.0.mlp.experts:out"] == (Outcome.SKIPPED, "not captured by the golden")
    assert found.total == len(sites()) + 2 == sum(found.counts.values())
    assert found.exit is Exit.INCONCLUSIVE


def test_a_smaller_capture_set_skips_instead_of_missing(golden: StoredRun, tmp_path: Path) -> None:
    tensors = sites()
    del tensors["layers.0.mlp:out"]
    blocks = SitePatterns("blocks", (":in", ":out"))
    smaller = make_run(tmp_path / "s", tensors, capture=blocks)
    found = row(compare(golden, smaller), "layers.0.mlp:out")
    assert (found.outcome, why(found)) == (
        Outcome.SKIPPED,
        "not captured by the candidate (capture=blocks)",
    )


def test_only_the_asked_scope_is_judged(golden: StoredRun, tmp_path: Path) -> None:
    found = compare(golden, isolated(tmp_path / "one", "layers.1"))
    assert {each.site.layer for each in found.rows} == {1}
    assert found.exit is Exit.OK
    assert whole_model(found) == (
        "inconclusive, 1 of 2 blocks compared, without embed_tokens, norm, lm_head"
    )


def test_block_outputs_alone_are_never_a_pass(golden: StoredRun, tmp_path: Path) -> None:
    tensors = {s: t for s, t in sites().items() if s in ("layers.0:in", "layers.0:out")}
    blocks = SitePatterns("blocks", ())
    alone = make_run(tmp_path / "c", tensors, stages=("layers.0",), capture=blocks)
    found = compare(golden, alone)
    assert row(found, "layers.0:out").outcome is Outcome.INCONCLUSIVE
    assert why(row(found, "layers.0:out")) == (
        "block output alone cannot show a bug inside; use capture=default, or dump what is inside"
    )
    assert found.exit is Exit.INCONCLUSIVE
    tensors["layers.0:out"] = tensors["layers.0:out"] + 1
    wrong = make_run(tmp_path / "w", tensors, stages=("layers.0",), capture=blocks)
    assert row(compare(golden, wrong), "layers.0:out").outcome is Outcome.FAIL


def test_a_component_is_compared_with_its_block(tmp_path: Path) -> None:
    block = {"layers.0": {"attn.w": "1", "mlp.w": "1"}}
    entry = "layers.0.post_attention_layernorm:out"
    whole = {**within(("layers.0",), sites()), entry: torch.ones(2, 5, 8)}
    golden = make_run(tmp_path / "g", whole, stages=("layers.0",), weights=block)
    part = within(("layers.0.mlp",), whole)

    def candidate(name: str, used: dict[str, str]) -> StoredRun:
        return make_run(
            tmp_path / name,
            part,
            stages=("layers.0.mlp",),
            feed="isolated",
            fed={entry: whole[entry]},
            weights={"layers.0.mlp": used},
        )

    found = compare(golden, candidate("same", {"mlp.w": "1"}))
    assert found.exit is Exit.OK
    assert {str(each.site) for each in found.rows} == set(part)
    assert "0 of 2 blocks compared, 1 in part" in whole_model(found)
    with pytest.raises(UserError, match=r"weights of layers.0.mlp \(mlp.w\)"):
        compare(golden, candidate("other", {"mlp.w": "2"}))
    with pytest.raises(UserError, match="which the golden has no fingerprint of"):
        compare(golden, candidate("none", {}))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 8, 5), "transposed layout"),
        ((2, 7, 8), "the other padded"),
        ((2, 40), r"shape \[2, 5, 8\] against \[2, 40\]"),
        ((2, 0, 8), r"against \[2, 0, 8\]: the candidate's tensor is empty$"),
        ((1, 1, 1), r"against \[1, 1, 1\]: the candidate's tensor holds one element$"),
    ],
)
def test_other_shapes_are_said_not_crashed_on(
    golden: StoredRun, tmp_path: Path, shape: tuple[int, ...], said: str
) -> None:
    tensors = {**sites(), "norm:out": torch.zeros(shape)}
    found = row(compare(golden, make_run(tmp_path / "c", tensors)), "norm:out")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert re.search(said, why(found))


def test_other_axes_are_said(golden: StoredRun, tmp_path: Path) -> None:
    axes = {"norm:out": ("batch", "channel", "token")}
    found = row(compare(golden, make_run(tmp_path / "c", sites(), axes=axes)), "norm:out")
    assert why(found) == "axes (batch, token, channel) against (batch, channel, token)"


def test_an_empty_tensor_is_inconclusive(tmp_path: Path) -> None:
    tensors = {**sites(), "norm:out": torch.empty(2, 0, 8)}
    runs = [make_run(tmp_path / name, tensors) for name in "gc"]
    found = row(compare(*runs), "norm:out")
    assert (found.outcome, found.metrics) == (Outcome.INCONCLUSIVE, {})


@pytest.mark.parametrize(
    ("values", "side", "metric", "value"),
    [
        (torch.zeros(2, 5, 8), "candidate", "candidate_constant", 0.0),
        (torch.full((2, 5, 8), 2.5), "candidate", "candidate_constant", 2.5),
        (sites()["norm:out"] * 1e-40, "candidate", "candidate_denormal", 1.0),
        (torch.full((2, 5, 8), math.nan), "candidate", "candidate_nonfinite", 1.0),
        (torch.zeros(2, 5, 8), "golden", "golden_constant", 0.0),
    ],
)
def test_a_tensor_that_nobody_computed_is_known(
    tmp_path: Path, values: torch.Tensor, side: str, metric: str, value: float
) -> None:
    sides = {"golden": sites(), "candidate": sites()}
    sides[side]["norm:out"] = values
    runs = [make_run(tmp_path / name, tensors) for name, tensors in sides.items()]
    found = row(compare(*runs), "norm:out")
    told = {k: v for k, v in found.metrics.items() if k.startswith(("golden_", "candidate_"))}
    assert (found.outcome, told) == (Outcome.FAIL, {metric: value})


def test_what_is_constant_among_the_real_tokens_is_constant(tmp_path: Path) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    other = {**sites(), "norm:out": sites()["norm:out"] * ~mask.bool()[..., None]}
    runs = [make_run(tmp_path / str(n), t, mask=mask) for n, t in enumerate((sites(), other))]
    assert row(compare(*runs), "norm:out").metrics["candidate_constant"] == 0
    other["norm:out"][1, 4, 7] = 1.0
    runs[1] = make_run(tmp_path / "one", other, mask=mask)
    assert "candidate_constant" not in row(compare(*runs), "norm:out").metrics


@pytest.mark.parametrize("value", [0.0, 3.0, 1e-42])
def test_constant_tensors_that_agree_are_no_pass(tmp_path: Path, value: float) -> None:
    tensors = {**sites(), "norm:out": torch.full((2, 5, 8), value)}
    runs = [make_run(tmp_path / name, tensors) for name in "gc"]
    assert row(compare(*runs), "norm:out").outcome is Outcome.INCONCLUSIVE


def test_tokens_that_all_have_the_same_numbers_prove_nothing(tmp_path: Path) -> None:
    """A head that sees none of its input, on both sides; on one side it is wrong as ever."""
    alike = sites()["norm:out"][:1, :1].expand(2, 5, 8).clone()
    other = {**sites(), "norm:out": alike}
    runs = [make_run(tmp_path / name, other) for name in "gc"]
    found = row(compare(*runs), "norm:out")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert why(found).startswith("all tokens have the same numbers on each side")
    one = row(compare(make_run(tmp_path / "sound", sites()), runs[1]), "norm:out")
    assert one.outcome is Outcome.FAIL and one.metrics["candidate_repeated"] == 1
    alike[1, 4, 7] += 1e-3
    runs = [make_run(tmp_path / f"{name}2", other) for name in "gc"]
    assert row(compare(*runs), "norm:out").outcome is Outcome.PASS


def test_sequences_that_decode_the_same_token_have_the_same_numbers(tmp_path: Path) -> None:
    alike = torch.randn(1, 1, 11).expand(2, 1, 11).clone()
    runs = [make_run(tmp_path / n, {**sites(), "lm_head:out@decode.1": alike}) for n in "gc"]
    assert row(compare(*runs), "lm_head:out@decode.1").outcome is Outcome.PASS


def test_tokens_of_one_number_each_prove_nothing(tmp_path: Path) -> None:
    """Logits of a head whose rows are all equal: no token is likelier than another, KL 0."""
    flat = torch.randn(2, 5, 1).expand(2, 5, 24) * (1 + 1e-7 * torch.randn(2, 5, 24))
    sound = {**sites(), "lm_head:out": torch.randn(2, 5, 24)}
    runs = [make_run(tmp_path / name, {**sound, "lm_head:out": flat}) for name in "gc"]
    found = row(compare(*runs), "lm_head:out")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert why(found).startswith("each token has one number throughout on each side")
    one = row(compare(make_run(tmp_path / "sound", sound), runs[1]), "lm_head:out")
    assert one.outcome is Outcome.FAIL and one.metrics["candidate_flat"] == 1
    constant = {**sound, "lm_head:out": torch.full((2, 5, 24), 0.5)}
    found = row(compare(make_run(tmp_path / "constant", constant), runs[1]), "lm_head:out")
    assert found.outcome is not Outcome.PASS
    nearly = flat.clone()
    nearly[1, 4, 7] += 1e-3
    runs = [make_run(tmp_path / f"{name}2", {**sound, "lm_head:out": nearly}) for name in "gc"]
    assert row(compare(*runs), "lm_head:out").outcome is Outcome.PASS


def test_decode_steps_and_tokens(tmp_path: Path) -> None:
    tensors = sites()
    for step in (1, 2):
        tensors[f"lm_head:out@decode.{step}"] = torch.randn(2, 1, 11)
    tensors["tokens:out@decode.0"] = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    golden = make_run(tmp_path / "g", tensors, mask=mask)
    assert compare(golden, make_run(tmp_path / "same", tensors, mask=mask)).exit is Exit.OK
    other = {**tensors, "tokens:out@decode.0": tensors["tokens:out@decode.0"].clone()}
    other["tokens:out@decode.0"][0, 0] = 9
    found = row(compare(golden, make_run(tmp_path / "c", other, mask=mask)), "tokens:out@decode.0")
    assert (found.outcome, found.metrics["unequal"]) == (Outcome.FAIL, 1)
    prefill = make_run(tmp_path / "p", sites(), mask=mask)
    absent = row(compare(golden, prefill), "lm_head:out@decode.2")
    assert absent.outcome is Outcome.SKIPPED
    assert why(absent) == "the candidate ran no decode step 2"


# Sides of several runs


def test_the_children_of_a_sweep_are_one_candidate(golden: StoredRun, tmp_path: Path) -> None:
    found = compare(golden, *(isolated(tmp_path / stage, stage) for stage in BLOCKS))
    assert found.exit is Exit.OK
    assert {each.site.layer for each in found.rows} == {0, 1}
    assert "2 of 2 blocks compared" in whole_model(found)
    assert found.candidate.name == "layers.0 and 1 more"
    assert [made.stages for made in found.candidate.made] == [("layers.0",), ("layers.1",)]


def test_a_side_is_named_by_its_sweep_its_run_or_its_folder(
    golden: StoredRun, tmp_path: Path
) -> None:
    parts = [isolated(tmp_path / stage, stage) for stage in BLOCKS]
    swept = [replace(part, parent="5weep", id=f"id{n}") for n, part in enumerate(parts)]
    found = compare(golden, *swept)
    assert (found.golden.named, run_text(found.golden)) == (str(golden.folder), str(golden.folder))
    assert (found.candidate.named, run_text(found.candidate)) == ("5weep", "id0,id1")
    assert compare(golden, swept[0]).candidate.named == "id0"
    assert compare(golden, *parts).candidate.named == ""


def test_the_configuration_of_a_run_comes_with_it(golden: StoredRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "c", sites())
    config = run.folder / "config.yaml"
    config.write_text("backend: {name: neuron}\ndtype: float16\nname: null\nlayer: 3\n")
    (made,) = compare(golden, run).candidate.made
    assert made.settings == {"backend": "neuron", "dtype": "float16", "layer": 3}
    config.write_text("a: [")
    with pytest.raises(UserError, match=r"config.yaml is damaged"):
        compare(golden, run)


def test_of_a_site_held_twice_the_newest_counts(golden: StoredRun, tmp_path: Path) -> None:
    tensors = within(("layers.0",), sites())
    wrong = {**tensors, "layers.0.mlp:out": tensors["layers.0.mlp:out"] + 1}
    old = make_run(tmp_path / "old", wrong, stages=("layers.0",))
    new = make_run(tmp_path / "new", tensors, stages=("layers.0",))
    assert compare(golden, old, new).exit is Exit.OK
    found = compare(golden, new, old)
    assert found.exit is Exit.FAILED
    said = warning_lines(found)[0]
    assert "more than one run" in said and "'old'" in said
    assert found.cautions[0].side == "candidate"


def test_a_golden_of_several_runs(golden: StoredRun, tmp_path: Path) -> None:
    parts = [
        make_run(tmp_path / stage, within((stage,), sites()), stages=(stage,)) for stage in BLOCKS
    ]
    candidate = make_run(tmp_path / "c", within(BLOCKS, sites()), stages=BLOCKS)
    found = conclude(parts, [candidate], FixedTolerance())
    assert found.exit is Exit.OK


def test_synthetic_inputs_are_said(golden: StoredRun, tmp_path: Path) -> None:
    made_up = make_run(tmp_path / "random", sites(), synthetic=True)
    assert "synthetic" in warning_lines(compare(golden, made_up))[0]


# Judging


def good() -> dict[str, float]:
    return {
        "max_abs_diff": 0.009,
        "mean_abs_diff": 0.0009,
        "similarity_percentage": 95.1,
        "cosine_distance": 0.009,
        "pearson": 0.991,
    }


def test_the_seeds_table() -> None:
    assert decide(Kind.REAL, good(), FixedTolerance()) == (Outcome.PASS, (), None)
    assert Settings is FixedTolerance


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("max_abs_diff", 0.01),
        ("mean_abs_diff", 0.001),
        ("similarity_percentage", 95.0),
        ("cosine_distance", 0.01),
        ("pearson", 0.99),
        ("pearson", math.nan),
        ("max_abs_diff", math.nan),
    ],
)
def test_each_limit_alone_fails(metric: str, value: float) -> None:
    metrics = {**good(), metric: value}
    outcome, (breach,), why_not = decide(Kind.REAL, metrics, FixedTolerance())
    assert (outcome, why_not) == (Outcome.FAIL, None)
    assert (breach.metric, breach.limit) == (metric, FixedTolerance().limits()[metric])
    assert breach_text(breach, metrics).startswith(metric)


def test_a_metric_that_was_not_measured_does_not_pass() -> None:
    metrics = good()
    del metrics["cosine_distance"]
    assert decide(Kind.REAL, metrics, FixedTolerance())[0] is Outcome.FAIL


def test_a_stored_row_is_judged_again_without_tensors(golden: StoredRun, tmp_path: Path) -> None:
    tensors = {**sites(), "norm:out": sites()["norm:out"] + 0.02}
    found = compare(golden, make_run(tmp_path / "c", tensors))
    again = Verdict.from_json(found.to_json())
    stored = row(again, "norm:out")
    wide = FixedTolerance(max_abs_diff=1, mean_abs_diff=1, similarity_percentage=-1)
    assert decide(stored.kind, stored.metrics, FixedTolerance())[0] is stored.outcome
    assert stored.outcome is Outcome.FAIL
    assert decide(stored.kind, stored.metrics, wide) == (Outcome.PASS, (), None)
