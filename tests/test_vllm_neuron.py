"""port=vllm_neuron: models of a stand-in of AWS's plugin, sharded over ranks, against a golden.

The stand-in is in tests/vllm_neuron_stand_in; a key of its NeuronConfig switches its mistakes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import vllm_neuron_sources as sources
from conftest import Ended

from layerparity.anatomy.site import PREFILL as PREFILLED
from layerparity.ground.errors import UserError
from layerparity.ports.vllm_neuron.library import model_class
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.answer import answer_of
from layerparity.report.reasons import reason
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Ran = Callable[..., Ended]
Judged = Callable[..., Verdict]
STAND_IN = Path(__file__).resolve().parent / "vllm_neuron_stand_in"
# Rows of other lengths: the shorter one is padded on the left, which the plugin never does.
ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33]]
# The other goldens have fewer steps, for they take longer than a candidate.
TOKENS = {"llama-float32": 9}
BLOCK = ("scope=single", "layer=0", "generate.max_new_tokens=0")
PREFILL = ("generate.max_new_tokens=0",)
STEPPED = "layers.0.self_attn:out@decode.1"
# The first step shows what later ones would.
STEP = ("generate.max_new_tokens=2",)
TWO = {"num_hidden_layers": 2, "vocab_size": 320}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: folders.llama(folder, **TWO),
    "gpt_oss": lambda folder: folders.gpt_oss(folder, **TWO),
    "qwen3": lambda folder: folders.qwen3(folder, **TWO),
}
NORMED = {"post_attention_layernorm:in", "post_attention_layernorm:out"}
SHOWN = {
    "input_layernorm:out",
    # Read from the paged cache.
    "self_attn:k_rotated",
    "self_attn:out",
    "post_attention_layernorm:in",
    "post_attention_layernorm:out",
    "mlp:out",
    ":in",
    ":out",
}
# Of the families that have taps for them.
MORE = {
    "qwen3": {"self_attn:in", "mlp:in"},
    "gpt_oss": {"mlp.gate:logits", "mlp.gate:choices", "mlp.experts:out"},
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


@pytest.mark.parametrize(
    ("mistake", "axes", "failing"),
    [
        ("", (), []),
        # A port that runs unobserved in between takes nothing of the first request away.
        (
            "metadata_of_the_request_before",
            ("job.axes=[observed,after]", "job.after=[40]"),
            ["after 40 cached"],
        ),
    ],
)
def test_what_one_request_leaves_for_the_next(
    ran: Ran, store: Path, mistake: str, axes: tuple[str, ...], failing: list[str]
) -> None:
    """A right model holds the floor in each arrangement; slots of a longer request do not."""
    words = ("job=invariance", "generate.max_new_tokens=0", "capture=default")
    ended = ran("llama", "float32", *words, *axes, *filter(None, [mistake and wrong(mistake)]))
    assert ended.exit == (1 if failing else 0), ended.out + ended.err
    run = next(iter(open_store(TrackingConfig(folder=str(store))).runs(kind="invariance")))
    record = json.loads(run.file("invariance.json").read_text())
    lines = {f"{e['axis']} {e['size']} {e['detail']}".strip(): e for e in record["variations"]}
    assert [name for name, each in lines.items() if each["failing"]] == failing
    if axes:
        (line,) = [each for each in record["variations"] if each["failing"]]
        assert line["cached"] == (
            "what layers.0 has cached is wrong: the keys of tokens 0 to 7; the values of tokens 0 "
            "to 7"
        )
    if not axes:
        refused = ran("llama", "float32", *words, "job.chunk=[1]")
        assert refused.exit == 2
        assert "holds no token of a shorter one" in refused.err
        assert {*record["left_out"]} == {"chunk", "draft", "threads", "compiled"}
        assert {"after 24 cached", "batch 4 last", "padding 8 right", "bucket 32"} <= {*lines}


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
        ("gpt_oss", "float32", 2),
    ],
)
def test_a_right_model_passes(judged: Judged, model: str, dtype: str, degree: int) -> None:
    """Key heads are repeated at 4 ranks; one row is padded; eight steps follow the prompt.

    GPT-OSS pads its channels, its ranks share biases, and its blocks go by their number.
    """
    verdict = judged(model, dtype, f"tp_degree={degree}")
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert verdict.whole.outcome is Outcome.PASS
    assert verdict.weights == ()
    assert verdict.candidate.device == (
        f"vLLM Neuron's CPU mode with {degree} rank{'s' * (degree > 1)}, not Neuron"
    )
    shown: dict[str, set[str]] = {}
    for row in verdict.rows:
        if row.site.layer is not None and row.metrics:
            shown.setdefault(f"{row.site.phase}.{row.site.step}", set()).add(row.site.local)
    assert len(shown) == TOKENS.get(f"{model}-{dtype}", 3)
    prefill = shown.pop("prefill.0")
    assert prefill == SHOWN | MORE.get(model, set())
    # What GPT-OSS does in a step one kernel does.
    step = SHOWN - NORMED if model == "gpt_oss" else prefill
    assert all(each == step for each in shown.values()), shown


def test_what_is_not_seen_is_said(judged: Judged) -> None:
    verdict = judged("gpt_oss", "float32", *BLOCK)
    skipped = [row for row in verdict.rows if row.outcome is Outcome.SKIPPED]
    why = {str(row.site): reason(row) for row in skipped if row.site.phase == PREFILLED}
    within = "the model computes it within a function"
    assert why == {
        **{
            f"layers.0.self_attn.{each}_proj:out": (
                f"{within} (its QKV projection is fused), so no hook sees it"
            )
            for each in "qkv"
        },
        "layers.0.self_attn:q_rotated": (
            f"{within} (rotary is part of the QKV projection), so no hook sees it"
        ),
        **{
            f"layers.0.self_attn.{each}_norm:out": (
                f"the checkpoint's block has no self_attn.{each}_norm"
            )
            for each in "qk"
        },
        "layers.0.self_attn:context": (
            f"{within} (attention and its output projection are one), so no hook sees it"
        ),
        "layers.0.mlp.gate:weights": f"{within}, so no hook sees it",
    }


@pytest.mark.parametrize(
    ("mistake", "degree", "model", "words", "where", "cause"),
    [
        # Square, so that it fits either way.
        ("o_proj_untransposed", 1, "llama", BLOCK, "layers.0.self_attn:out", ""),
        ("keys_left_out", 2, "llama", BLOCK, "layers.0.self_attn.k_proj", "never_loaded"),
        ("norm_after_rotary", 2, "qwen3", BLOCK, "layers.0.self_attn:k_rotated", ""),
        ("residual_on_each_rank", 2, "llama", BLOCK, "layers.0.self_attn:out", ""),
        ("gate_and_up_swapped", 2, "llama", BLOCK, "layers.0.mlp:out", ""),
        ("router_bias_dropped", 2, "gpt_oss", BLOCK, "layers.0.mlp.gate:logits", ""),
        ("wrong_vocabulary_shard", 2, "llama", PREFILL, "embed_tokens:out", ""),
        ("off_by_one_block", 2, "llama", STEP, STEPPED, ""),
        ("blocks_of_another_request", 2, "llama", STEP, STEPPED, ""),
        # What is written wrong is seen in the cache, before anything reads it.
        (
            "metadata_of_the_request_before",
            2,
            "llama",
            STEP,
            "layers.0.self_attn:k_rotated",
            "decode_cache",
        ),
        ("position_of_the_longest", 2, "llama", STEP, "layers.0.self_attn:k_rotated@decode.1", ""),
    ],
)
def test_a_mistake_is_named(
    judged: Judged,
    mistake: str,
    degree: int,
    model: str,
    words: tuple[str, ...],
    where: str,
    cause: str,
) -> None:
    verdict = judged(model, "float32", f"tp_degree={degree}", *words, wrong(mistake))
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)
    # A router goes by the checkpoint's own name for it.
    named = where.partition(":")[0].replace("mlp.gate", "mlp.router")
    assert conclusion(verdict).startswith(f"{named} is the first wrong place")
    assert [each.id for each in verdict.causes[:1]] == ([cause] if cause else [])


def test_a_head_of_other_ranks_is_named_with_its_weights_and_ranks(judged: Judged) -> None:
    """Every rank holds a whole head: that its queries read another one is what is wrong."""
    verdict = judged("llama", "float32", "tp_degree=4", *BLOCK, wrong("kv_heads_in_turn"))
    assert verdict.outcome is Outcome.FAIL
    assert conclusion(verdict) == (
        "layers.0.self_attn.k_proj is the first wrong place, on ranks 1, 2 of 4"
    )
    assert (verdict.causes[0].id, verdict.causes[0].shown) == ("gqa_layout", True)
    assert {each.component for each in verdict.weights} == {"self_attn.k_proj", "self_attn.v_proj"}


CLASSES = "vllm_neuron.model.llama3.model."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((f"port.model={CLASSES}Eagle3LlamaForCausalLM",), "is a draft model, and port="),
        ((f"port.model={CLASSES}LlamaForConditionalGeneration",), "is a vision model, and port="),
        (("port.model=vllm_neuron.model.causal_lm.MLP",), "has no from_configs(hf_config, "),
        ((f"port.model={CLASSES}LlamaWithoutCache",), "has no load_weights, get_kv_spec, bind_kv"),
        ((f"port.model={CLASSES}LamaForCausalLM",), "has no class 'LamaForCausalLM'"),
        (("port.model=vllm_neuron.models.Model",), "no module 'vllm_neuron.models'"),
        (("port.path=[]",), "port=vllm_neuron needs vllm, which is not installed: install vllm"),
        ((f"port.path=[{STAND_IN}/none]",), "none, which is no folder"),
        (("port.neuron_config=bf16",), "write port.neuron_config={key: value}"),
        (("port.neuron_config={fused: true}",), "unexpected keyword argument 'fused'"),
        (
            ("tp_degree=2", "port.neuron_config={on_device_sampling_config: {}}", PREFILL[0]),
            "the head gives 160 logits of 320 on each rank: leave on_device_sampling_config out",
        ),
        (("port.block_size=0",), "port.block_size=0 holds no token"),
        (
            ("scope=single", "layer=0", "component=mlp", "generate.max_new_tokens=0"),
            "runs whole blocks, and layers.0.mlp is a component of one: leave component out",
        ),
        (("tp_degree=2", "moe_ep_degree=2"), "shares no experts by number: use moe_ep_degree=1"),
        (
            ("backend.runtime=native",),
            "and port=vllm_neuron runs vLLM Neuron's CPU mode on the CPU",
        ),
        (("backend.compile=export",), "port=vllm_neuron is uncompiled: leave backend.compile out"),
        (("backend=gpu",), "port=vllm_neuron is not for backend=gpu: use backend=neuron"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    ran: Ran, words: tuple[str, ...], said: str
) -> None:
    ended = ran("llama", "float32", *words)
    assert (ended.exit, len(ended.err.strip().splitlines())) == (2, 1), ended.err
    assert said in ended.err


def test_the_plugins_own_model_of_an_architecture_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    taken = model_class("", [str(STAND_IN)], ["Qwen3ForCausalLM"])
    assert taken.__name__ == "Qwen3ForCausalLM"
    with pytest.raises(UserError, match="is a draft model"):
        model_class("", [], ["Eagle3LlamaForCausalLM"])
    with pytest.raises(UserError, match=r"names Qwen4ForCausalLM, and .* Llama.*Did you mean"):
        model_class("", [], ["Qwen4ForCausalLM"])


def test_the_tool_runs_a_model_of_the_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "_TOKENS", 2)
    assert sources.main(["--path", str(STAND_IN), "--only", "gpt_oss tp 2"]) == 0
    assert capsys.readouterr().out.endswith("1 of 1 cases pass.\n")
    assert sources.main(["--path", str(STAND_IN), "--only", "no such"]) == 1
