"""port=vllm_neuron: models of a stand-in of AWS's plugin, sharded over ranks, against a golden.

The stand-in is in tests/vllm_neuron_stand_in; a key of its NeuronConfig switches its mistakes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
from conftest import Ended

from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.answer import answer_of

Ran = Callable[..., Ended]
Judged = Callable[..., Verdict]
STAND_IN = Path(__file__).resolve().parent / "vllm_neuron_stand_in"
# Rows of other lengths: the shorter one is padded on the left, which the plugin never does.
ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33]]
# The other goldens have fewer steps, for they take longer than a candidate.
TOKENS = {"llama-float32": 9}
BLOCK = ("scope=single", "layer=0", "generate.max_new_tokens=0")
# The first step shows what later ones would.
STEP = ("generate.max_new_tokens=2",)
TWO = {"num_hidden_layers": 2, "vocab_size": 320}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: folders.llama(folder, **TWO),
    "gpt_oss": lambda folder: folders.gpt_oss(folder, **TWO),
    "qwen3": lambda folder: folders.qwen3(folder, **TWO),
}
SHOWN = {
    "input_layernorm:out",
    "self_attn:out",
    "post_attention_layernorm:in",
    "post_attention_layernorm:out",
    "mlp:out",
    ":in",
    ":out",
}


@pytest.fixture
def ran(cli: Ran, store: Path) -> Ran:
    """Return a function that runs a model of the stand-in; its golden is made when first asked."""
    (store / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")

    def run(model: str, dtype: str, *words: str) -> Ended:
        folder = store / model
        path = folder if folder.is_dir() else MODELS[model](folder)
        both = (f"tracking.folder={store}", f"model.path={path}", f"dtype={dtype}")
        golden = f"{model}-{dtype}"
        both += ("capture=components", f"generate.max_new_tokens={TOKENS.get(golden, 3)}")
        if not (store / golden).exists():
            fed = ("inputs=tokens", f"inputs.file={store / 'rows.json'}", "device_map=cpu")
            fed += ("reference.components=false", f"reference.dtypes=[{dtype}]")
            ended = cli(*both, *fed, f"name={golden}")
            assert ended.exit == 0, ended.err
            (store / golden).touch()
        own = ("backend=neuron", "port=vllm_neuron", f"port.path=[{STAND_IN}]")
        return cli(*both, *own, "kind=candidate", f"golden={golden}", "name=sharded", *words)

    return run


@pytest.fixture
def judged(ran: Ran, store: Path, concluded: Callable[[Path, str, str], Verdict]) -> Judged:
    """Return a function that runs a model of the stand-in and gives the verdict on it."""

    def judge(model: str, dtype: str, *words: str) -> Verdict:
        ended = ran(model, dtype, *words)
        assert ended.exit == 0, ended.err
        return concluded(store, f"{model}-{dtype}", "sharded")

    return judge


def wrong(mistake: str) -> str:
    return f"port.neuron_config={{mistake: {mistake}}}"


def conclusion(verdict: Verdict) -> str:
    """Return the sentence on the first wrong place."""
    answer = answer_of(verdict, [])
    return answer.where if answer else ""


@pytest.mark.parametrize(
    ("model", "dtype", "degree"),
    [
        ("llama", "float32", 1),
        ("llama", "float32", 2),
        ("llama", "float32", 4),
        ("llama", "bfloat16", 2),
        ("qwen3", "float32", 2),
    ],
)
def test_a_right_model_passes(judged: Judged, model: str, dtype: str, degree: int) -> None:
    """Key heads are repeated at 4 ranks; one row is padded; eight steps follow the prompt."""
    verdict = judged(model, dtype, f"tp_degree={degree}")
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert verdict.whole.outcome is Outcome.PASS
    assert verdict.weights == ()
    passed: dict[tuple[str, int], set[str]] = {}
    for row in verdict.rows:
        if row.site.layer is not None and row.metrics:
            passed.setdefault(row.site.pass_step, set()).add(row.site.local)
    assert len(passed) == TOKENS.get(f"{model}-{dtype}", 3)
    more = {"self_attn:in", "mlp:in"} if model == "qwen3" else set()
    assert all(each == SHOWN | more for each in passed.values()), passed


MISTAKES = [
    ("o_proj_untransposed", 1, "llama", BLOCK, "layers.0.self_attn:out"),
    ("kv_heads_in_turn", 4, "llama", BLOCK, "layers.0.self_attn:out"),
    ("norm_after_rotary", 2, "qwen3", BLOCK, "layers.0.self_attn:out"),
    ("residual_on_each_rank", 2, "llama", BLOCK, "layers.0.self_attn:out"),
    ("gate_and_up_swapped", 2, "llama", BLOCK, "layers.0.mlp:out"),
    ("keys_left_out", 2, "llama", BLOCK, "layers.0.self_attn.k_proj"),
    ("off_by_one_block", 2, "llama", STEP, "layers.0.self_attn:out@decode.1"),
    ("blocks_of_another_request", 2, "llama", STEP, "layers.0.self_attn:out@decode.1"),
    ("metadata_of_the_request_before", 2, "llama", STEP, "layers.0.self_attn:out@decode.1"),
    ("position_of_the_longest", 2, "llama", STEP, "layers.0.self_attn:out@decode.1"),
    ("wrong_vocabulary_shard", 2, "llama", ("generate.max_new_tokens=0",), "embed_tokens:out"),
]


@pytest.mark.parametrize(("mistake", "degree", "model", "words", "where"), MISTAKES)
def test_a_mistake_is_named(
    judged: Judged, mistake: str, degree: int, model: str, words: tuple[str, ...], where: str
) -> None:
    verdict = judged(model, "float32", f"tp_degree={degree}", *words, wrong(mistake))
    print(
        mistake,
        verdict.outcome,
        verdict.where,
        [c.id for c in verdict.causes],
        conclusion(verdict),
        verdict.weights,
    )
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)
