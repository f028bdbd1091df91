"""Cause rules: the likeliest cause of made-up evidence, and silence where nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bisections import evidence, row, site
from runs import make_run

from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.judge.weights_kind import altered
from layerparity.mistakes.catalogue import likeliest, rules, suspected
from layerparity.mistakes.cause import Evidence, Tokens
from layerparity.mistakes.norms import between_heads
from layerparity.mistakes.shape import blocks_of, median, outliers, spread, trend
from layerparity.model.prints import print_of
from layerparity.record.verdict import Outcome
from layerparity.record.weights import Fate, WeightFinding
from layerparity.report.answer import reasons_of

FACTS = {"num_attention_heads": "4", "num_key_value_heads": "2", "head_dim": "8", "rotary_dim": "4"}
ONE_ROW = Tokens(tuple([0] * 12), tuple(range(12)))
PADDED = Tokens((0,) * 6 + (1,) * 6, tuple(range(6)) * 2, frozenset({1}))
GROWING = [0.0, *(0.1 * at for at in range(1, 12))]
BIAS = "model.layers.3.mlp.e_score_correction_bias"


def finding(what: str, component: str, name: str = "model.w") -> WeightFinding:
    return WeightFinding(name, "layers.3", 3, component, what, Fate.NOT_GOLDEN)


def slopes(**groups: list[float]) -> dict[str, list[float]]:
    return {f"slope_{name}": values for name, values in groups.items()}


def made(component: str, local: str, metrics: dict[str, float], **more: Any) -> Evidence:
    profiles = {local: more.pop("profiles", {})}
    return evidence(component, local, metrics, profiles=profiles, **{"facts": FACTS, **more})


Q_NORM = ("self_attn.q_norm", "self_attn.q_norm:out")
BY_HEAD = [x for head in (0.4, -0.2, 0.1, -0.3) for x in [head] * 8]
BY_CHANNEL = [math.sin(7 * n) for n in range(32)]
CASES = {
    "rotary": made(
        "self_attn", "self_attn:q_rotated", {}, part="rotary", errors=GROWING, tokens=ONE_ROW
    ),
    "rope_full_instead_of_partial": made(
        "self_attn",
        "self_attn:q_rotated",
        {},
        part="rotary",
        errors=GROWING,
        tokens=ONE_ROW,
        profiles=slopes(channel=[0.0, 0.0, 0.0, 0.0, -0.4, -0.2, 0.0, 0.0] * 4),
    ),
    "position_ids_wrong": made(
        "self_attn",
        "self_attn:q_rotated",
        {},
        part="rotary",
        errors=[1e-6] * 6 + [0.7] * 6,
        tokens=PADDED,
    ),
    "mask_off_by_one": made(
        "self_attn",
        "self_attn:context",
        {},
        part="attention core",
        errors=[1 / (at + 1) for at in range(12)],
        tokens=ONE_ROW,
    ),
    "gqa_layout": made(
        "self_attn",
        "self_attn:context",
        {},
        part="attention core",
        errors=[0.5] * 12,
        tokens=ONE_ROW,
        profiles=slopes(head=[0.0, 0.0, -0.9, -1.1]),
    ),
    "scale": made(
        "self_attn.o_proj",
        "self_attn:out",
        {"cosine_distance": 0.0, "rel_l2": 0.2501, "norm_ratio": 1.25, "pearson": 1.0},
        errors=[0.25] * 12,
    ),
    "degenerate_output": made("mlp", "mlp:out", {"candidate_constant": 0.0, "norm_ratio": 0.0}),
    "qk_norm_per_head": made(
        *Q_NORM, {"norm_ratio": 0.82, "slope_channel_z": 50}, profiles=slopes(channel=BY_HEAD)
    ),
    "qk_norm_skipped": made(
        *Q_NORM, {"norm_ratio": 0.58, "passed_through": 1.0}, profiles=slopes(channel=BY_CHANNEL)
    ),
    "qk_norm_averaged": made(
        *Q_NORM,
        {"norm_ratio": 1.1},
        findings=[
            replace(
                finding("changed_value", Q_NORM[0]),
                fate=Fate.AVERAGED,
                numbers={"spread": 0.1, "expected": 0.4},
            )
        ],
    ),
    "router_bias_dropped": made(
        "mlp.gate",
        "mlp.gate:choices",
        {"set_agreement": 0.25, "flips_outside_noise": 20},
        passed=("mlp.gate:logits", "mlp.gate:weights"),
    ),
    "router_softmax": made(
        "mlp.gate",
        "mlp.gate:choices",
        {"set_agreement": 0.6},
        failed={"mlp.gate:weights": {"rel_l2": 0.3, "norm_ratio": 1.1}},
        passed=("mlp.gate:logits",),
    ),
    "router_topk_not_normalised": made(
        "mlp.gate",
        "mlp.gate:weights",
        {"norm_ratio": 2.8, "cosine_distance": 0.005, "rel_l2": 1.8},
        passed=("mlp.gate:logits", "mlp.gate:choices"),
    ),
    "bias_frozen_in_graph": made(
        "mlp.gate",
        "mlp.gate:choices",
        {"set_agreement": 0.4},
        passed=("mlp.gate:logits",),
        findings=[finding("constant", "mlp.gate", BIAS)],
    ),
    "never_loaded": made(
        "self_attn.q_proj",
        "self_attn.q_proj:out",
        {"pearson": 0.01, "slope": -0.99, "rel_l2": 1.0},
        failed={"self_attn.k_proj:out": {"pearson": 0.02}},
        findings=[finding("never_loaded", "self_attn.q_proj")],
    ),
    "fused_qkv_order": made(
        "self_attn.q_proj",
        "self_attn.q_proj:out",
        {"pearson": 0.02},
        failed={"self_attn.k_proj:out": {"pearson": 0.02}},
        findings=[finding("reordered", "self_attn.q_proj")],
    ),
    "gate_up_swapped": made(
        "mlp.experts",
        "mlp.experts:out",
        {"rel_l2": 0.9, "pearson": 0.2},
        findings=[replace(finding("reordered", "mlp.experts", "experts.0.w1"), holds=("0.w3",))],
    ),
    "weights_altered": made(
        "self_attn.o_proj",
        "self_attn:out",
        {"rel_l2": 0.5, "pearson": 0.9},
        findings=[finding("changed_value", "self_attn.o_proj")],
    ),
    "fp8_scale": made(
        "mlp.experts",
        "mlp.experts:out",
        {"rel_l2": 50.0},
        findings=[finding("missing", "mlp.experts", "w1.weight_scale_inv")],
    ),
    "nonfinite": made("mlp", "mlp:out", {"nonfinite_disagreement": 3}),
    "rmsnorm_prefill_vs_decode": made(
        "post_attention_layernorm",
        "post_attention_layernorm:out",
        {},
        phase="decode",
        step=2,
        other_phase={"post_attention_layernorm:out": row(site(3, "post_attention_layernorm:out"))},
    ),
    "decode_cache": made(
        "self_attn",
        "self_attn:k_rotated",
        {},
        phase="decode",
        step=1,
        passed=["self_attn:q_rotated"],
        other_phase={"self_attn:k_rotated": row(site(3, "self_attn:k_rotated"))},
    ),
}


# What is shown on stored tensors alone: tests/test_exact.py, tests/test_exact_ports.py and
# tests/test_rank_faults.py have their cases.
ON_TENSORS = {
    "attention_bias_dropped",
    "embedding_of_rank_0",
    "expert_biases",
    "first_experts_always",
    "head_of_rank_0",
    "position_frozen_in_graph",
    "rope_scaling_left_out",
    "sinks_missing_in_window",
    "vocabulary_padding_unmasked",
    "channels_permuted",
    "residual_sum",
    "mask_missing",
    "layer_norm_for_rms_norm",
    "clamped",
    "one_factor_each",
    "qk_norm_per_rank",
    "routing_weights_masked",
    "weight_sliced_per_rank",
    "offset",
    "one_channel",
    "one_expert",
    "one_head",
    "precision",
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_likeliest_cause_is_the_one_that_was_made(name: str) -> None:
    causes = suspected(CASES[name])
    assert causes[0].id == name, causes
    assert 0 < causes[0].confidence <= 1
    assert reasons_of(causes[0])
    assert not causes[0].sentence.endswith(".")


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert set(rules()) == set(CASES) | ON_TENSORS


def test_every_rule_is_silent_about_a_clean_place() -> None:
    clean = {"rel_l2": 1e-7, "error_ratio": 0.9, "slope": 1e-9, "norm_ratio": 1.0, "pearson": 1.0}
    quiet = made("self_attn.o_proj", "self_attn:out", clean, errors=[1e-7] * 4)
    assert likeliest(quiet) == []
    assert likeliest(Evidence("mlp")) == []


def test_a_missing_bias_beats_what_its_lack_looks_like() -> None:
    lost = made(
        "mlp.gate",
        "mlp.gate:choices",
        {"set_agreement": 0.25},
        passed=("mlp.gate:logits",),
        findings=[finding("never_loaded", "mlp.gate", BIAS)],
    )
    assert likeliest(lost)[0].id == "router_bias_dropped"


def test_a_bias_that_the_model_does_not_have_is_not_missing() -> None:
    apart = {"set_agreement": 0.97, "flips_outside_noise": 3}
    passed = ("mlp.gate:logits", "mlp.gate:weights")
    blind = made("mlp.gate", "mlp.gate:choices", apart, passed=passed)
    gate = "model.layers.1.mlp.gate.weight"
    without = replace(blind, tensors=frozenset({gate}))
    beside = frozenset({gate, "model.layers.1.mlp.gate.e_score_correction_bias"})
    assert "router_bias_dropped" not in {each.id for each in likeliest(without)}
    assert likeliest(replace(blind, tensors=beside))[0].id == "router_bias_dropped"


def test_a_bias_that_is_known_to_be_right_is_not_blamed() -> None:
    apart = {"set_agreement": 0.0}
    blind = made("mlp.gate", "mlp.gate:choices", apart, passed=("mlp.gate:logits",))
    seen = made("mlp.gate", "mlp.gate:choices", apart, passed=("mlp.gate:logits",))
    seen = replace(seen, weights_compared=True)
    assert [each.id for each in suspected(seen)] == [each.id for each in suspected(blind)] == []
    good = ("mlp.gate:logits", "mlp.gate:weights")
    told = made("mlp.gate", "mlp.gate:choices", apart, passed=good)
    assert [each.id for each in suspected(told)] == ["router_bias_dropped"]
    assert suspected(replace(told, weights_compared=True)) == []


def test_a_norm_that_passes_its_input_through_is_skipped_whatever_its_size() -> None:
    seen = {"norm_ratio": 0.99, "passed_through": 1.0}
    skipped = made(*Q_NORM, seen, phase="decode", step=1)
    assert likeliest(skipped)[0].id == "qk_norm_skipped"
    assert likeliest(skipped)[0].confidence > 0.9


def test_a_norm_that_fails_in_the_prefill_too_is_not_blamed_on_decoding() -> None:
    failing = {Q_NORM[1]: row(site(3, Q_NORM[1]), Outcome.FAIL)}
    both = made(*Q_NORM, {}, phase="decode", step=1, other_phase=failing)
    assert "rmsnorm_prefill_vs_decode" not in {cause.id for cause in likeliest(both)}


def moved(component: str, name: str, whose: str) -> WeightFinding:
    fate = Fate.ANOTHER
    return WeightFinding(name, "layers.3", 3, component, "reordered", fate, holds=(whose,))


def test_halves_that_changed_places_are_gate_and_up_in_any_mlp() -> None:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = [moved(f"mlp.{a}", f"model.layers.3.mlp.{a}.weight", b) for a, b in names.items()]
    dense = made("mlp", "mlp:out", {"rel_l2": 0.8, "pearson": 0.7}, findings=swapped)
    assert {cause.id for cause in likeliest(dense)} == {"gate_up_swapped", "weights_altered"}


def test_rows_of_both_halves_in_other_places_are_not_known_to_be_swapped() -> None:
    both = ("layers.3.mlp.gate_proj", "layers.3.mlp.up_proj")
    mixed = [
        replace(moved("mlp", f"model.{each}.weight", ""), fate=Fate.MIXED_ROWS, holds=both)
        for each in both
    ]
    dense = made("mlp", "mlp:out", {"rel_l2": 0.8}, findings=mixed)
    stack = moved("mlp", "model.layers.3.mlp.experts.gate_up_proj", "")
    stacked = made("mlp", "mlp:out", {"rel_l2": 0.8}, findings=[replace(stack, holds=())])
    for found in (dense, stacked):
        assert [cause.id for cause in likeliest(found)] == ["weights_altered"]


def test_experts_in_another_order_are_not_gate_and_up() -> None:
    name = "model.layers.3.mlp.experts.0.w1.weight"
    shifted = [moved("mlp.experts", name, "experts.3.w1")]
    other = made("mlp.experts", "mlp.experts:out", {"rel_l2": 0.8}, findings=shifted)
    assert [cause.id for cause in likeliest(other)] == ["weights_altered"]


def test_rounding_of_rotated_queries_is_no_wrong_rotation_where_no_floor_is_known() -> None:
    rounded = [0.0, *(0.002 + 0.0001 * at for at in range(1, 12))]
    told = {"part": "rotary", "errors": rounded, "tokens": ONE_ROW}
    assert likeliest(made("self_attn", "self_attn:q_rotated", {}, **told)) == []
    judged = made("self_attn", "self_attn:q_rotated", {"error_ratio": 9.0}, **told)
    assert suspected(judged)[0].id == "rotary"


def test_wrong_attention_on_well_rotated_queries_is_not_their_rotation() -> None:
    told = {"part": "attention core", "errors": GROWING, "tokens": ONE_ROW}
    rotated = ("self_attn:q_rotated", "self_attn:k_rotated")
    found = suspected(made("self_attn", "self_attn:context", {}, passed=rotated, **told))
    assert "rotary" not in {cause.id for cause in found}
    told["part"] = "rotary"
    wrong = suspected(made("self_attn", "self_attn:q_rotated", {}, **told))
    assert "rotary" in {cause.id for cause in wrong}


@pytest.mark.parametrize("component", ["self_attn", "self_attn.o_proj", "mlp.gate", ""])
def test_another_component_s_weight_explains_nothing(component: str) -> None:
    wrong = [finding(what, "mlp.experts") for what in ("reordered", "never_loaded", "constant")]
    seen = made(component, "self_attn:out", {"rel_l2": 0.3})
    assert suspected(replace(seen, findings=wrong)) == suspected(seen)


@pytest.mark.parametrize("name", ["scale", "qk_norm_skipped", "qk_norm_per_head"])
def test_another_component_s_weight_silences_nothing(name: str) -> None:
    case = CASES[name]
    wrong = [finding("reordered", "self_attn.v_proj")]
    assert suspected(replace(case, findings=wrong)) == suspected(replace(case, findings=()))


def test_heads_that_are_off_alike_in_halves_are_not_normed_by_head() -> None:
    """As a rank's heads are, each of two ranks having normed its own."""
    halves = [0.2 if head < 2 else -0.1 for head in range(4) for _ in range(8)]
    metrics = {"norm_ratio": 0.82, "slope_channel_z": 50}
    by_rank = suspected(made(*Q_NORM, metrics, profiles=slopes(channel=halves)))
    # By chance most of the variance may lie between halves.
    for heads in (BY_HEAD, [x for head in (0.4, 0.3, -0.3, -0.4) for x in [head] * 8]):
        by_head = suspected(made(*Q_NORM, metrics, profiles=slopes(channel=heads)))
        assert "qk_norm_per_head" in {cause.id for cause in by_head}
    assert "qk_norm_per_head" not in {cause.id for cause in by_rank}


def test_one_projection_in_another_order_is_not_said_to_be_fused_wrongly() -> None:
    seen = made(
        "self_attn.q_proj", "self_attn:out", {}, findings=[finding("reordered", "self_attn.q_proj")]
    )
    assert [each.id for each in likeliest(seen)] == ["weights_altered"]
    both = [finding("reordered", f"self_attn.{name}") for name in ("q_proj", "k_proj")]
    assert "fused_qkv_order" in {each.id for each in likeliest(replace(seen, findings=both))}


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"candidate_constant": 0.0}, "the candidate's tensor is all zero: it was never written"),
        ({"candidate_constant": 2500.0}, "is the same number everywhere (2500)"),
        ({"candidate_denormal": 1.0}, "the candidate's tensor is denormal numbers alone"),
        ({"candidate_nonfinite": 1.0, "nonfinite_disagreement": 9.0}, "is NaN or Inf everywhere"),
        ({"golden_constant": 0.0}, "the golden's own tensor is all zero: look at how the golden"),
        ({"golden_denormal": 1.0}, "the golden's own tensor is denormal numbers alone, next to"),
    ],
)
def test_a_tensor_that_nobody_computed_has_its_own_words(
    metrics: dict[str, float], says: str
) -> None:
    first = likeliest(made("mlp", "mlp:out", metrics))[0]
    assert first.id == "degenerate_output"
    assert says in first.sentence


def test_weights_altered_in_another_way_do_not_blame_their_scales() -> None:
    slipped = [finding("changed_value", "self_attn.q_proj", "model.q_proj.weight")]
    other = made("self_attn.q_proj", "self_attn.q_proj:out", {"rel_l2": 0.5}, findings=slipped)
    assert "fp8_scale" not in {cause.id for cause in likeliest(other)}


def test_weights_without_their_scales_are_told_from_others() -> None:
    maker = torch.Generator().manual_seed(0)
    numbers = torch.randn(32, 32, generator=maker).clamp(-3, 3)
    numbers *= 448 / float(numbers.abs().max())
    right = print_of(numbers * 1e-3)
    dropped, inverted, slipped = (
        altered(right, replace(print_of(held), stored="float8_e4m3fn"))
        for held in (numbers, numbers * 1e3, numbers * 1.1e-3)
    )
    assert dropped.what == inverted.what == "changed_value"
    assert dropped.lacks == inverted.lacks == "weight_scale_inv"
    assert dropped.fate is Fate.SCALE_DROPPED
    assert inverted.fate is Fate.SCALE_UNUSED
    assert slipped.lacks == altered(right, print_of(numbers)).lacks == ""


def test_shapes() -> None:
    assert trend([1, 2, 3, 4], [1, 2, 3, 4]) == pytest.approx(1)
    assert trend([4, 3, 2, 1], [1, 2, 3, 4]) == pytest.approx(-1)
    assert trend([1, 1, 1, 1], [1, 2, 3, 4]) == 0
    assert trend([1, 2], [1, 2]) == 0
    assert spread([2, 2, 2]) == 0
    assert spread([]) == math.inf
    assert median([math.nan, 3]) == 3
    assert blocks_of([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert blocks_of([1, 2, 3], 2) == []
    assert outliers([0.0, -1.0, 0.1, math.nan]) == [1]
    assert between_heads([1, 1, 2, 2], 2) == 1
    assert between_heads([1, 2, 1, 2], 2) == 0
    assert between_heads([1, 1], 2) is None


def test_a_norm_that_puts_out_its_input_is_known_by_its_bytes(tmp_path: Path) -> None:
    values = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    q, k = "layers.0.self_attn.q_norm:out", "layers.0.self_attn.k_norm:out"
    given = {site.replace("_norm", "_proj"): values for site in (q, k)}
    golden = make_run(tmp_path / "golden", {**given, q: values / 2, k: values})
    candidate = make_run(
        tmp_path / "candidate", {**given, q: values.clone(), k: values}, kind="candidate"
    )
    found = conclude([golden], [candidate], FixedTolerance())
    told = {str(each.site): each.metrics.get("passed_through") for each in found.rows}
    assert told[q] == 1
    assert told[k] is None
