"""What tools/sharding.py runs: ways to share a model over ranks, mistakes, and what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sharding_runs import DTYPES, KEY_HEADS, MODELS

DEGREES = (2, 4, 8)
CLEAN = "clean"
CAPTURED = 4
# What partial sums may change in float32.
NEAR = 2e-6
# The rank of mistakes that one rank makes.
WRONG = 1
WAYS = {
    "emulated": "one process computes as the ranks do (port.emulate_tp)",
    "gloo": "transformers' own plan, a process a rank (backend=gpu tp_degree)",
    "nxdi": "NxD's layers, of the tests' stand-in, a process a rank (port=nxdi)",
    "spmd": "XLA shards one program (backend=neuron tp_degree), on XLA:CPU, not Neuron",
    "capture": "what each rank's TensorCapture left, of the tests' stand-in (job=capture)",
}
ALL, NOBODY = "all", ""
# The ways in which no rank has a part of the vocabulary that a mistake could be about.
WHOLE = {
    "vocabulary_of_rank_0": ("emulated", "gloo", "spmd"),
    "head_of_rank_0": ("gloo", "spmd"),
}
# Whose a mistake is in a way that plants it otherwise, or shows less: by way and mistake, and of
# KV heads by degree. A rank with the wrong half of the heads is one; others are right.
RANKS = {
    ("emulated", "norm_sliced"): NOBODY,
    ("gloo", "norm_sliced"): str(WRONG),
    ("capture", "norm_sliced"): str(WRONG),
    ("spmd", "norm_sliced"): NOBODY,
}
TILED = {4: "1,2", 8: "1,4"}
# Over 8 ranks, those that have one of the 4 query heads: the others have padding to norm.
WITH_HEADS = {8: "0,1,4,5"}


@dataclass(frozen=True)
class Mistake:
    """One mistake of sharding: the first wrong place, the causes that name it, and whose it is.

    ``models`` are those that can make it; ``where`` are the places that it may be found at.
    """

    models: tuple[str, ...]
    where: tuple[str, ...]
    causes: tuple[str, ...]
    ranks: str = ALL


_SPARSE = ("minimax_m2", "qwen3_moe")
MISTAKES = {
    "norm_per_rank": Mistake(("minimax_m2",), ("self_attn.q_norm",), ("qk_norm_per_rank",)),
    "kv_tiled": Mistake(MODELS, ("self_attn",), ("gqa_layout",)),
    "bias_on_each_rank": Mistake(("llama",), ("self_attn",), ("o_proj_bias_per_rank",)),
    "experts_shifted": Mistake(_SPARSE, ("mlp",), ("experts_of_next_rank",), str(WRONG)),
    "missing_reduction": Mistake(MODELS, ("self_attn",), ("attention_not_reduced",)),
    "norm_sliced": Mistake(
        MODELS,
        # The known bug of that name, which XLA's way plants, is of the first norm.
        ("post_attention_layernorm", "input_layernorm"),
        ("weight_sliced_per_rank", "weights_altered"),
    ),
    "vocabulary_of_rank_0": Mistake(MODELS, ("embed_tokens",), ("embedding_of_rank_0",)),
    "head_of_rank_0": Mistake(MODELS, ("lm_head",), ("head_of_rank_0",)),
}


@dataclass(frozen=True)
class Cell:
    """One run: a way, a model, so many ranks, a dtype, and a mistake or none."""

    way: str
    model: str
    degree: int
    dtype: str
    mistake: str = CLEAN

    @property
    def name(self) -> str:
        """What the line begins with."""
        return f"{self.way} {self.model} tp {self.degree} {self.dtype} {self.mistake}"

    @property
    def cannot(self) -> str:
        """Why there is no such run; nothing where there is one."""
        captured = self.way == "capture"
        repeated = self.way not in ("gloo", "spmd") and self.degree > KEY_HEADS
        whys = {
            "the stand-in captures a MiniMax-M2 and a Llama in bfloat16": captured
            and (self.model == "qwen3_moe" or self.dtype != "bfloat16"),
            "the stand-in pads no heads": captured and self.degree > CAPTURED,
            f"{self.model} has nothing to make it with": self.mistake != CLEAN
            and self.model not in MISTAKES[self.mistake].models,
            "of an expert a rank has 8 bytes, and torch's grouped_mm wants 16": self.way == "gloo"
            and (self.degree, self.dtype) == (8, "bfloat16")
            and self.model != "llama",
            "no KV head is repeated": self.mistake == "kv_tiled" and not repeated,
            "every rank holds the whole vocabulary there, or its head is not captured": self.way
            in WHOLE.get(self.mistake, ()),
        }
        return next((why for why, true in whys.items() if true), "")


def cells(
    ways: list[str], models: list[str], degrees: list[int], dtypes: list[str], faults: list[str]
) -> Iterator[Cell]:
    """Yield the cells that can be run: each way, model and degree, clean in each dtype, then wrong.

    Mistakes are made in the first of the dtypes that there is.
    """
    for way in ways:
        for degree in degrees:
            for model in models:
                every = [
                    Cell(way, model, degree, dtype, fault)
                    for fault in faults
                    for dtype in (dtypes if fault == CLEAN else _first(way, dtypes))
                ]
                yield from (each for each in every if not each.cannot)


def _first(way: str, dtypes: list[str]) -> list[str]:
    return [DTYPES[1]] if way == "capture" else dtypes[:1]
