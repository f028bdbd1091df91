"""Cases: which runs the masters are made of, and which comparisons of them are kept.

A word is a word of the command line. ``make.py`` makes the runs, ``changes.py`` the changed copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Words = tuple[str, ...]
CALIBRATED: dict[str, Any] = {"name": "calibrated"}
FIXED: dict[str, Any] = {"name": "fixed"}
_BF16 = "dtype=bfloat16"
_ALL = "capture=components"
_ISOLATED = "reference.chained=false"
_WHOLE = "reference.components=false"
_LAYERS_0_TO_2: Words = ("scope=range", "start=0", "end=2")
_LAYERS_0_TO_1: Words = ("scope=range", "start=0", "end=1")
_LAYER_0: Words = ("scope=range", "start=0", "end=0")


@dataclass(frozen=True)
class Golden:
    """A golden run: its model, the lengths of its rows of tokens, and the words that make it."""

    model: str
    rows: tuple[int, ...]
    words: Words


@dataclass(frozen=True)
class Case:
    """One comparison: the stored folders of both sides, and how they are judged.

    Without a golden only the candidate's weights are looked at.
    """

    golden: Words
    candidate: Words
    tolerance: dict[str, Any]


# Two rows of 12 and 8 tokens: padded, and more than the 16 real tokens that slopes want.
GOLDENS: dict[str, Golden] = {
    "bf16": Golden("tiny", (12, 8), (_BF16, *_LAYERS_0_TO_2, _ALL, _ISOLATED, _WHOLE)),
    "fp32": Golden("tiny", (16,), (*_LAYERS_0_TO_1, _ALL, _ISOLATED, _WHOLE)),
    "chain": Golden("tiny", (7, 4), (_WHOLE, "reference.dtypes=[float32]")),
    "spoken": Golden("tiny", (8,), (_BF16, _ALL, _ISOLATED, _WHOLE, "generate.max_new_tokens=3")),
    "part": Golden("tiny", (12, 8), (_BF16, *_LAYER_0, _ALL, _ISOLATED)),
    "bare": Golden("tiny", (8,), (*_LAYER_0, "reference.make=false")),
    "fp8": Golden("tiny_fp8", (12, 8), (_BF16, *_LAYER_0, _ALL, _ISOLATED, _WHOLE)),
    "gpt_oss": Golden("gpt_oss", (12, 8), (_BF16, *_LAYERS_0_TO_1, _ALL, _ISOLATED, _WHOLE)),
    "qwen3_moe": Golden("qwen3_moe", (8,), (_BF16, *_LAYERS_0_TO_2, _ISOLATED, _WHOLE)),
    "llama": Golden(
        "llama", (12,), (_ALL, _ISOLATED, _WHOLE, "reference.dtypes=[float32,bfloat16]")
    ),
    "gemma2": Golden("gemma2", (16,), (_BF16, *_LAYER_0, _ALL, _ISOLATED, _WHOLE)),
    "cohere": Golden("cohere", (16,), (_BF16, *_LAYER_0, _ALL, _ISOLATED, _WHOLE)),
}


def _single(layer: int, *words: str) -> Words:
    return ("scope=single", f"layer={layer}", *words)


def _clean(name: str) -> Words:
    return ("port=clean", f"port.name='{name}'")


def _fault(name: str, layer: int) -> Words:
    return ("port=fault", f"port.name={name}", f"port.layers=[{layer}]")


def _mutation(which: str, layer: int) -> Words:
    port = "port._target_=judging.port.MutationPort"
    return (port, f"+port.which='{which}'", f"+port.layers=[{layer}]")


_FAULTS = (
    "bias_frozen_in_graph",
    "fused_qkv_order",
    "gate_up_swapped",
    "o_proj_renamed_twice",
    "position_ids_wrong",
    "qk_norm_averaged",
    "qk_norm_per_head",
    "qk_norm_skipped",
    "qkv_never_loaded",
    "rope_full_instead_of_partial",
    "router_bias_dropped",
    "router_softmax",
    "router_topk_not_normalised",
)
# Mistakes that no rule of a known fault was written for, by their ids; a star is what is drawn.
_ROW_SLIPS = "slip-self_attn.q_proj-0.3%-too-large-in-row-*"
_DRAWN = {
    "gate_weights_scaled": "constant-mlp.gate-weights-times-1.01",
    "norm_in_fp8": "precision-input_layernorm-rounds-its-output-to-float8_e5m2",
    "one_channel_halved": "scale-self_attn.q_norm-channel-*-times-0.5",
    "one_head_scaled": "scale-self_attn.k_proj-head-*-times-0.97",
    "one_expert_scaled": "scale-mlp.experts.down-expert-*-times-0.9",
    "one_row_slips": _ROW_SLIPS,
    "mask_one_ahead": "shift-self_attn-mask-sees-one-token-ahead",
    "mask_forgets_first": "shift-self_attn-mask-forgets-the-first-token",
    "rotary_base_wrong": "constant-self_attn-rotary-base-times-100",
}
_LEAST_SLIP = "slip-self_attn.k_proj-0.1%-too-large-in-row-*"
_NORM_IN_FP8 = "precision-{}_feedforward_layernorm-rounds-its-output-to-float8_e5m2"
# Positions of decode steps alone: a prompt of `spoken` has eight tokens.
_LATE_POSITIONS = "shift-self_attn-positions-from-9-on-by-+1"
_FULL_SPOKEN: Words = (_BF16, _ALL, "generate.max_new_tokens=3")
_CHAINED: Words = ("feed=chained",)

# Candidates by name: the golden that feeds each, and the words that make it.
CANDIDATES: dict[str, tuple[str, Words]] = {
    "bf16-right": ("bf16", (_BF16, _ALL, *_single(1), *_clean("64 shards"))),
    "bf16-eager": ("bf16", (_BF16, _ALL, *_single(1), "attn_implementation=eager")),
    **{f"bf16-{name}": ("bf16", (_BF16, _ALL, *_single(1), *_fault(name, 1))) for name in _FAULTS},
    **{
        f"bf16-{name}": ("bf16", (_BF16, _ALL, *_single(1), *_mutation(which, 1)))
        for name, which in _DRAWN.items()
    },
    **{
        f"bf16-sweep-{layer}": ("bf16", (_BF16, *_single(layer), *_clean("shuffled")))
        for layer in range(3)
    },
    "bf16-blocks": ("bf16", (_BF16, *_LAYERS_0_TO_2, "capture=blocks", *_clean("shuffled"))),
    "bf16-chained": ("bf16", (_BF16, *_LAYERS_0_TO_2, *_CHAINED, *_clean("shuffled"))),
    "bf16-float16": ("bf16", ("dtype=float16", *_single(1))),
    "fp32-right": ("fp32", (_ALL, *_single(1), *_clean("64 shards"))),
    "fp32-in_bf16": ("fp32", (_BF16, _ALL, *_single(1))),
    "fp32-router_softmax": ("fp32", (_ALL, *_single(1), *_fault("router_softmax", 1))),
    "fp32-qk_norm_per_head": ("fp32", (_ALL, *_single(1), *_fault("qk_norm_per_head", 1))),
    "fp32-one_row_slips": ("fp32", (_ALL, *_single(1), *_mutation(_ROW_SLIPS, 1))),
    "fp32-least_slip": ("fp32", (_ALL, *_single(1), *_mutation(_LEAST_SLIP, 1))),
    "chain-right": ("chain", (*_CHAINED, *_clean("shuffled"))),
    "chain-replayed": (
        "chain",
        (*_CHAINED, "port.replay=true", "attn_implementation=eager"),
    ),
    "chain-isolated": ("chain", _clean("64 shards")),
    "chain-router_bias_dropped": ("chain", (*_CHAINED, *_fault("router_bias_dropped", 2))),
    "chain-o_proj_renamed_twice": (
        "chain",
        ("scope=range", "start=2", "end=4", *_CHAINED, *_fault("o_proj_renamed_twice", 3)),
    ),
    "spoken-right": ("spoken", (*_FULL_SPOKEN, *_clean("shuffled"))),
    "spoken-rmsnorm_prefill_vs_decode": (
        "spoken",
        (*_FULL_SPOKEN, *_fault("rmsnorm_prefill_vs_decode", 2)),
    ),
    "spoken-bias_frozen_in_graph": (
        "spoken",
        (_BF16, "generate.max_new_tokens=3", *_fault("bias_frozen_in_graph", 4)),
    ),
    "spoken-positions_from_9": (
        "spoken",
        (*_FULL_SPOKEN, *_mutation(_LATE_POSITIONS, 1)),
    ),
    "spoken-chained": (
        "spoken",
        (_BF16, "generate.max_new_tokens=2", *_CHAINED, *_clean("shuffled")),
    ),
    "spoken-prefill_only": ("spoken", (_BF16, *_clean("shuffled"))),
    "part-attention": (
        "part",
        (_BF16, _ALL, *_single(0, "component=attention"), *_clean("shuffled")),
    ),
    "part-moe-router_softmax": (
        "part",
        (_BF16, _ALL, *_single(0, "component=moe"), *_fault("router_softmax", 0)),
    ),
    "bare-right": ("bare", (*_single(0), *_clean("shuffled"))),
    "fp8-scale_ignored": ("fp8", (_BF16, _ALL, *_single(0), *_fault("fp8_scale_ignored", 0))),
    "fp8-scale_inverted": ("fp8", (_BF16, _ALL, *_single(0), *_fault("fp8_scale_inverted", 0))),
    "gpt_oss-right": ("gpt_oss", (_BF16, _ALL, *_single(1), *_clean("64 shards"))),
    "gpt_oss-swiglu_bias_dropped": (
        "gpt_oss",
        (_BF16, _ALL, *_single(1), *_fault("swiglu_bias_dropped", 1)),
    ),
    "qwen3_moe-dense-0": ("qwen3_moe", (_BF16, *_single(0), *_clean("shuffled"))),
    "qwen3_moe-dense-2": ("qwen3_moe", (_BF16, *_single(2), *_clean("shuffled"))),
    "llama-right": ("llama", (_ALL, *_clean("shuffled"))),
    "llama-gate_up_swapped": ("llama", (_ALL, *_single(1), *_fault("gate_up_swapped", 1))),
    "llama-in_bf16-o_proj": (
        "llama",
        (_BF16, _ALL, *_single(2), *_fault("o_proj_renamed_twice", 2)),
    ),
    "gemma2-right": ("gemma2", (_BF16, _ALL, *_single(0))),
    "gemma2-gate_up_swapped": ("gemma2", (_BF16, _ALL, *_single(0), *_fault("gate_up_swapped", 0))),
    "gemma2-norm_before_mlp_in_fp8": (
        "gemma2",
        (_BF16, _ALL, *_single(0), *_mutation(_NORM_IN_FP8.format("pre"), 0)),
    ),
    "gemma2-norm_after_mlp_in_fp8": (
        "gemma2",
        (_BF16, _ALL, *_single(0), *_mutation(_NORM_IN_FP8.format("post"), 0)),
    ),
    "cohere-right": ("cohere", (_BF16, _ALL, *_single(0), *_clean("shuffled"))),
    "cohere-gate_up_swapped": ("cohere", (_BF16, _ALL, *_single(0), *_fault("gate_up_swapped", 0))),
}

# Copies of stored runs with a change that no command makes: the run, and the change's name.
COPIES: dict[str, tuple[str, str]] = {
    "bf16-missing": ("bf16-right", "without_a_site"),
    "bf16-nan": ("bf16-right", "with_nan"),
    "bf16-zeros": ("bf16-right", "with_zeros"),
    "bf16-offset": ("bf16-right", "with_offset"),
    "bf16-absorbed": ("bf16-gate_up_swapped", "with_another_weight"),
    "bf16-silent": ("bf16-gate_up_swapped", "without_prints"),
    "dump-golden": ("fp32", "dumped_as_npy"),
    "dump-candidate": ("fp32-router_softmax", "dumped_as_safetensors"),
}
_UNCOMPARED = ("dump-golden", "dump-candidate")


def _cases() -> dict[str, Case]:
    """Return every comparison: each candidate with its golden, and those that take more."""
    fed_by = {name: golden for name, (golden, _) in CANDIDATES.items()}
    fed_by |= {name: fed_by.get(source, source) for name, (source, _) in COPIES.items()}
    alone = {
        name: Case((golden,), (name,), CALIBRATED)
        for name, golden in fed_by.items()
        if name not in _UNCOMPARED
    }
    weighed = {f"weights-{name}": Case((), (name,), {}) for name in _WEIGHED}
    return alone | weighed | _MORE


_WEIGHED = (
    "bf16-right",
    "bf16-silent",
    *(f"bf16-{name}" for name in _FAULTS),
    "bf16-one_row_slips",
    "bf16-one_expert_scaled",
    "fp32-least_slip",
    "fp8-scale_ignored",
    "gpt_oss-right",
)
_STRICT = {**FIXED, "max_abs_diff": 1e-6, "mean_abs_diff": 1e-7}
_SWEEP: Words = tuple(f"bf16-sweep-{layer}" for layer in range(3))
_MORE: dict[str, Case] = {
    "sweep": Case(("bf16",), _SWEEP, CALIBRATED),
    "sweep-with-one-wrong": Case(("bf16",), (*_SWEEP, "bf16-router_softmax"), CALIBRATED),
    "dense-only": Case(("qwen3_moe",), ("qwen3_moe-dense-0", "qwen3_moe-dense-2"), CALIBRATED),
    "fixed-bf16-right": Case(("bf16",), ("bf16-right",), FIXED),
    "fixed-bf16-gate_up_swapped": Case(("bf16",), ("bf16-gate_up_swapped",), FIXED),
    "fixed-bf16-router_softmax": Case(("bf16",), ("bf16-router_softmax",), FIXED),
    "fixed-fp32-right": Case(("fp32",), ("fp32-right",), FIXED),
    "fixed-fp32-right-strict": Case(("fp32",), ("fp32-right",), _STRICT),
    "fixed-bare-right": Case(("bare",), ("bare-right",), FIXED),
    "fixed-spoken-chained": Case(("spoken",), ("spoken-chained",), FIXED),
    "narrow-bf16-eager": Case(("bf16",), ("bf16-eager",), {**CALIBRATED, "error_ratio": 0.5}),
    "dumps": Case(("dump-golden",), ("dump-candidate",), FIXED),
    "dumps-calibrated": Case(("dump-golden",), ("dump-candidate",), CALIBRATED),
    "dump-against-run": Case(("fp32",), ("dump-candidate",), FIXED),
    "run-against-dump": Case(("dump-golden",), ("fp32-right",), FIXED),
}
CASES = _cases()
