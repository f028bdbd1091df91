"""The committed tiny checkpoint: is it what it claims to be, and would a port's bug show in it?

Whether training still gives this folder, bit for bit, is not asked here: that is only promised for
one kind of machine. ``python checkpoints/train_minimax_m2.py --check`` asks it, in a minute.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, MiniMaxM2ForCausalLM

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
sys.path.insert(0, str(CHECKPOINTS))

from tiny_statistics import Measured, ask, chat_prompt, encode, measure  # noqa: E402

FOLDER = CHECKPOINTS / "tiny_minimax_m2"
PROMPT = "Two machines compare"
BLOCKS, EXPERTS, TOP_K, HEAD_DIM, MASSIVE = 6, 16, 4, 32, 3
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def text() -> str:
    return (CHECKPOINTS / "text.txt").read_text(encoding="utf-8").strip()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def ids(tokenizer: Any, text: str) -> Tensor:
    return encode(tokenizer, text + tokenizer.eos_token)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def measured(request: pytest.FixtureRequest, tokenizer: Any, ids: Tensor) -> Measured:
    return measure(load(request.param), ids, encode(tokenizer, PROMPT).shape[1])


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@cache
def load(dtype: torch.dtype, attention: str = "sdpa", experts: str | None = None) -> Any:
    """Load as anybody would, each once; ``experts=None`` is transformers' own choice."""
    chosen = {} if experts is None else {"experts_implementation": experts}
    model = MiniMaxM2ForCausalLM.from_pretrained(
        FOLDER, dtype=dtype, attn_implementation=attention, **chosen
    )
    return model.eval()


def published_names() -> set[str]:
    """The names under which the real checkpoint stores its tensors."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for number in range(BLOCKS):
        block = f"model.layers.{number}"
        moe = f"{block}.block_sparse_moe"
        attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        names |= {f"{block}.self_attn.{part}.weight" for part in attention}
        names |= {f"{block}.{part}layernorm.weight" for part in ("input_", "post_attention_")}
        names |= {f"{moe}.gate.weight", f"{moe}.e_score_correction_bias"}
        pairs = itertools.product(range(EXPERTS), ("w1", "w2", "w3"))
        names |= {f"{moe}.experts.{expert}.{part}.weight" for expert, part in pairs}
    return names


def biases(stored: dict[str, Tensor]) -> list[Tensor]:
    """The router bias of every block."""
    named = "model.layers.{}.block_sparse_moe.e_score_correction_bias"
    return [stored[named.format(number)].float() for number in range(BLOCKS)]


# ------------------------------------------------------------------ the folder


def test_folder_is_small_and_holds_only_what_a_checkpoint_needs() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 4_000_000


def test_nothing_is_pickled_and_everything_else_is_text() -> None:
    for path in FOLDER.iterdir():
        if path.suffix != ".safetensors":
            path.read_text(encoding="utf-8")
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert weights.metadata() == {"format": "pt"}


def test_tensors_have_the_published_names(stored: dict[str, Tensor]) -> None:
    assert set(stored) == published_names()


def test_every_tensor_is_bf16_and_finite(stored: dict[str, Tensor]) -> None:
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in stored.values())


def test_config_is_a_small_minimax_m2(config: dict[str, Any]) -> None:
    expected = {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": BLOCKS,
        "head_dim": HEAD_DIM,
        "rotary_dim": HEAD_DIM // 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }
    assert {name: config.get(name) for name in expected} == expected
    # Two fields that say how much is rotated could disagree.
    assert "rope_parameters" not in config
    assert "partial_rotary_factor" not in config


def test_rotary_dim_is_honoured_on_reload(config: dict[str, Any]) -> None:
    loaded = AutoConfig.from_pretrained(FOLDER)
    assert loaded.rope_parameters["partial_rotary_factor"] == 0.5
    assert loaded.rope_parameters["rope_theta"] == config["rope_theta"]
    frequencies = load(torch.float32).model.rotary_emb.inv_freq
    assert 2 * len(frequencies) == config["rotary_dim"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reload_is_bit_equal(dtype: torch.dtype, stored: dict[str, Tensor]) -> None:
    model, info = MiniMaxM2ForCausalLM.from_pretrained(
        FOLDER, dtype=dtype, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    for number in range(BLOCKS):
        moe, name = f"model.layers.{number}.mlp", f"model.layers.{number}.block_sparse_moe"
        part = {
            (expert, w): stored[f"{name}.experts.{expert}.{w}.weight"]
            for expert in range(EXPERTS)
            for w in ("w1", "w2", "w3")
        }
        gate_up = [torch.cat((part[e, "w1"], part[e, "w3"])) for e in range(EXPERTS)]
        down = [part[e, "w2"] for e in range(EXPERTS)]
        assert torch.equal(state.pop(f"{moe}.experts.gate_up_proj"), torch.stack(gate_up).to(dtype))
        assert torch.equal(state.pop(f"{moe}.experts.down_proj"), torch.stack(down).to(dtype))
    for name, tensor in state.items():
        assert torch.equal(tensor, stored[name.replace(".mlp.", ".block_sparse_moe.")].to(dtype))


# ------------------------------------------------------------------ the recital


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_generation_recites_the_text(dtype: torch.dtype, tokenizer: Any, text: str) -> None:
    model = load(dtype)
    assert PROMPT + ask(model, tokenizer, PROMPT) == text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", [None, "eager", "batched_mm"])
def test_best_tokens_are_the_text_in_every_clean_variant(
    dtype: torch.dtype,
    attention: str,
    experts: str | None,
    ids: Tensor,
    tokenizer: Any,
    threads: Any,
) -> None:
    model, prompt = load(dtype, attention, experts), encode(tokenizer, PROMPT).shape[1]
    for count in (1, 2):
        threads(count)
        with torch.no_grad():
            best = model(input_ids=ids).logits[0].argmax(-1)
        assert torch.equal(best[prompt - 1 : -1], ids[0, prompt:])


def test_margin_along_the_recital_is_comfortable(measured: Measured) -> None:
    assert measured.wrong == 0
    assert measured.least_margin > 3


def test_chat_prompt_is_answered(tokenizer: Any) -> None:
    model = load(torch.bfloat16)
    answer = ask(model, tokenizer, chat_prompt(tokenizer, "Who are you?"))
    assert answer == "I am a tiny model with six layers. I was made to be compared."
    asked = chat_prompt(tokenizer, "Tell me about the two machines.")
    assert ask(model, tokenizer, asked, limit=4).startswith(PROMPT)


def test_padding_does_not_change_the_words(tokenizer: Any, text: str) -> None:
    last = text.splitlines()[-1]
    middle = last.partition(",")[0]
    batch = tokenizer([PROMPT, middle], return_tensors="pt", padding=True)
    made = load(torch.bfloat16).generate(**batch, max_new_tokens=10)
    first, second = tokenizer.batch_decode(made, skip_special_tokens=True)
    assert len(first) > 2 * len(PROMPT)
    assert text.startswith(first)
    assert len(second) > 2 * len(middle)
    assert last.startswith(second)


# ------------------------------------------------------------------ would a bug show?


def test_router_bias_is_near_8_5_on_the_grid_of_bf16(stored: dict[str, Tensor]) -> None:
    for bias in biases(stored):
        assert torch.equal(bias, (bias * 16).round() / 16)
        assert bias.min() >= 8.0
        assert bias.max() <= 9.0
        assert bias.max() - bias.min() >= 0.4
        assert abs(bias.mean() - 8.5) < 0.1


def test_every_expert_is_used_and_no_set_dominates(measured: Measured) -> None:
    for block in measured.blocks:
        fair = sum(block.expert_use) / EXPERTS
        assert sum(block.expert_use) == measured.tokens * TOP_K
        assert min(block.expert_use) > fair / 4
        assert max(block.expert_use) < fair * 2
        assert block.commonest_set < 0.1


def test_every_expert_is_used_within_two_lines(text: str, tokenizer: Any) -> None:
    prompt = encode(tokenizer, "\n".join(text.splitlines()[:2]))
    for block in measure(load(torch.float32), prompt, 1).blocks:
        assert min(block.expert_use) > 0


def test_dropping_the_router_bias_changes_most_expert_sets(measured: Measured) -> None:
    assert all(block.sets_changed_without_bias > 0.5 for block in measured.blocks)


def test_near_ties_are_few_but_some(measured: Measured) -> None:
    assert all(0 < block.near_ties < 0.25 for block in measured.blocks)


def test_every_block_sees_massive_channels(measured: Measured) -> None:
    for block in measured.blocks:
        massive, ordinary = block.massive_ratios[:MASSIVE], block.massive_ratios[MASSIVE:]
        assert min(massive) > 20
        assert max(massive) < 100
        assert max(ordinary) < 3


@pytest.mark.parametrize(
    ("fault", "least"),
    [("q_norm averaged", 0.09), ("q_norm per head", 0.05), ("rope on all", 0.2)],
)
def test_fault_in_attention_is_visible(measured: Measured, fault: str, least: float) -> None:
    for block in measured.blocks:
        assert block.attention_cost[fault] > least
        assert block.update_cost[fault] > least


def test_norm_weights_are_not_left_at_one(stored: dict[str, Tensor]) -> None:
    for name, weight in stored.items():
        if "norm" in name:
            assert (weight == 1).float().mean() < 0.05, name
            spread = weight.float().log().std()
            assert 0.2 < spread < 1.5, name


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_heads_have_unlike_norm_weights(stored: dict[str, Tensor], norm: str) -> None:
    for number in range(BLOCKS):
        weight = stored[f"model.layers.{number}.self_attn.{norm}.weight"].float()
        heads = weight.view(-1, HEAD_DIM).mean(1)
        assert heads.max() / heads.min() > 1.8


def test_weights_have_the_scale_of_a_trained_model(stored: dict[str, Tensor]) -> None:
    for name, weight in stored.items():
        if weight.ndim == 2 and "embed_tokens" not in name:
            assert 0.02 < weight.float().std() < 0.2, name


def test_embeddings_are_untied(stored: dict[str, Tensor]) -> None:
    embedding, head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    assert embedding.shape == head.shape
    assert not torch.equal(embedding, head)
