"""The shipped checkpoints: are they what they claim to be, and would a port's bug show in them?

Whether training still gives these folders, bit for bit, is not asked here: that is only promised
for one kind of machine. ``python checkpoints/train_minimax_m2.py --check`` asks it, in minutes.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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

from shipped_statistics import Measured, ask, chat_prompt, encode, measure  # noqa: E402

PROMPT = "Two machines compare"
TOP_K, MASSIVE = 4, 3
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, eq=False)
class Shipped:
    """A checkpoint: what it is, and how realistic it has to be.

    ``used`` are the least and the largest load of an expert by its fair share, ``unused`` the share
    of experts that no token of the text may reach. ``ties`` is the largest share of near-ties,
    ``massive`` the least ratio of a massive channel, ``bias`` what a block's router biases lie
    between, ``spread`` apart at least and ``centre`` from 8.5 on average at most. ``costs`` are the
    least of each fault, to the attention and to the block.
    """

    name: str
    blocks: int
    experts: int
    head_dim: int
    heads: int
    says: str
    size: int
    used: tuple[float, float]
    unused: float
    ties: float
    massive: float
    bias: tuple[float, float]
    spread: float
    centre: float
    weights: tuple[float, float]
    costs: dict[str, tuple[float, float]]

    @property
    def folder(self) -> Path:
        return CHECKPOINTS / self.name


TINY = Shipped(
    name="tiny_minimax_m2",
    blocks=6,
    experts=16,
    head_dim=32,
    heads=4,
    says="I am a tiny model with six layers. I was made to be compared.",
    size=4_000_000,
    used=(0.25, 2),
    unused=0,
    ties=0.25,
    massive=20,
    bias=(8.0, 9.0),
    spread=0.4,
    centre=0.1,
    weights=(0.02, 0.2),
    costs={
        "q_norm averaged": (0.09, 0.09),
        "q_norm per head": (0.05, 0.05),
        "rope on all": (0.2, 0.2),
    },
)
# Narrow blocks leave less room: loads are less even, and the last blocks outgrow what was massive.
DEEP = Shipped(
    name="deep_minimax_m2",
    blocks=62,
    experts=32,
    head_dim=16,
    heads=12,
    says="I am a narrow model with sixty-two layers. I was made to be compared.",
    size=12_000_000,
    used=(0, 5),
    unused=0.02,
    ties=0.6,
    massive=2.5,
    bias=(8.0, 10.0),
    spread=0.12,
    centre=0.9,
    weights=(0.015, 0.3),
    costs={
        "q_norm averaged": (0.2, 0.06),
        "q_norm per head": (0.09, 0.04),
        "rope on all": (0.5, 0.15),
    },
)


@pytest.fixture(scope="module", params=[TINY, DEEP], ids=lambda each: each.name)
def shipped(request: pytest.FixtureRequest) -> Shipped:
    return request.param


@pytest.fixture(scope="module")
def text() -> str:
    return (CHECKPOINTS / "text.txt").read_text(encoding="utf-8").strip()


@pytest.fixture(scope="module")
def tokenizer(shipped: Shipped) -> Any:
    return AutoTokenizer.from_pretrained(shipped.folder)


@pytest.fixture(scope="module")
def config(shipped: Shipped) -> dict[str, Any]:
    return json.loads((shipped.folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stored(shipped: Shipped) -> dict[str, Tensor]:
    return load_file(shipped.folder / "model.safetensors")


@pytest.fixture(scope="module")
def ids(tokenizer: Any, text: str) -> Tensor:
    return encode(tokenizer, text + tokenizer.eos_token)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def measured(
    request: pytest.FixtureRequest, shipped: Shipped, tokenizer: Any, ids: Tensor
) -> Measured:
    return measure(load(shipped, request.param), ids, encode(tokenizer, PROMPT).shape[1])


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@cache
def load(
    shipped: Shipped, dtype: torch.dtype, attention: str = "sdpa", experts: str | None = None
) -> Any:
    """Load as anybody would, each once; ``experts=None`` is transformers' own choice."""
    chosen = {} if experts is None else {"experts_implementation": experts}
    model = MiniMaxM2ForCausalLM.from_pretrained(
        shipped.folder, dtype=dtype, attn_implementation=attention, **chosen
    )
    return model.eval()


def published_names(shipped: Shipped) -> set[str]:
    """The names under which the real checkpoint stores its tensors."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for number in range(shipped.blocks):
        block = f"model.layers.{number}"
        moe = f"{block}.block_sparse_moe"
        attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        names |= {f"{block}.self_attn.{part}.weight" for part in attention}
        names |= {f"{block}.{part}layernorm.weight" for part in ("input_", "post_attention_")}
        names |= {f"{moe}.gate.weight", f"{moe}.e_score_correction_bias"}
        pairs = itertools.product(range(shipped.experts), ("w1", "w2", "w3"))
        names |= {f"{moe}.experts.{expert}.{part}.weight" for expert, part in pairs}
    return names


def biases(stored: dict[str, Tensor]) -> list[Tensor]:
    """The router bias of every block."""
    named = "model.layers.{}.block_sparse_moe.e_score_correction_bias"
    blocks = sum(name.endswith("e_score_correction_bias") for name in stored)
    return [stored[named.format(number)].float() for number in range(blocks)]


# ------------------------------------------------------------------ the folder


def test_folder_is_small_and_holds_only_what_a_checkpoint_needs(shipped: Shipped) -> None:
    files = {path.name: path.stat().st_size for path in shipped.folder.iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= shipped.size


def test_nothing_is_pickled_and_everything_else_is_text(shipped: Shipped) -> None:
    for path in shipped.folder.iterdir():
        if path.suffix != ".safetensors":
            path.read_text(encoding="utf-8")
    with safe_open(shipped.folder / "model.safetensors", "pt") as weights:
        assert weights.metadata() == {"format": "pt"}


def test_tensors_have_the_published_names(shipped: Shipped, stored: dict[str, Tensor]) -> None:
    assert set(stored) == published_names(shipped)


def test_every_tensor_is_bf16_and_finite(stored: dict[str, Tensor]) -> None:
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in stored.values())


def test_config_is_a_small_minimax_m2(shipped: Shipped, config: dict[str, Any]) -> None:
    expected = {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        # What runs compute in where nobody says it: small bugs show in it.
        "dtype": "float32",
        "num_hidden_layers": shipped.blocks,
        "head_dim": shipped.head_dim,
        "rotary_dim": shipped.head_dim // 2,
        "num_attention_heads": shipped.heads,
        "num_key_value_heads": 2,
        "num_local_experts": shipped.experts,
        "num_experts_per_tok": TOP_K,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        # What mlx-lm and others ask for.
        "attn_type_list": [1] * shipped.blocks,
        "shared_intermediate_size": 0,
        "use_mtp": False,
    }
    assert {name: config.get(name) for name in expected} == expected
    # Two fields that say how much is rotated could disagree.
    assert "rope_parameters" not in config
    assert "partial_rotary_factor" not in config


def test_rotary_dim_is_honoured_on_reload(shipped: Shipped, config: dict[str, Any]) -> None:
    loaded = AutoConfig.from_pretrained(shipped.folder)
    assert loaded.rope_parameters["partial_rotary_factor"] == 0.5
    assert loaded.rope_parameters["rope_theta"] == config["rope_theta"]
    frequencies = load(shipped, torch.float32).model.rotary_emb.inv_freq
    assert 2 * len(frequencies) == config["rotary_dim"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reload_is_bit_equal(
    shipped: Shipped, dtype: torch.dtype, stored: dict[str, Tensor]
) -> None:
    model, info = MiniMaxM2ForCausalLM.from_pretrained(
        shipped.folder, dtype=dtype, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    for number in range(shipped.blocks):
        moe, name = f"model.layers.{number}.mlp", f"model.layers.{number}.block_sparse_moe"
        part = {
            (expert, w): stored[f"{name}.experts.{expert}.{w}.weight"]
            for expert in range(shipped.experts)
            for w in ("w1", "w2", "w3")
        }
        gate_up = [torch.cat((part[e, "w1"], part[e, "w3"])) for e in range(shipped.experts)]
        down = [part[e, "w2"] for e in range(shipped.experts)]
        assert torch.equal(state.pop(f"{moe}.experts.gate_up_proj"), torch.stack(gate_up).to(dtype))
        assert torch.equal(state.pop(f"{moe}.experts.down_proj"), torch.stack(down).to(dtype))
    for name, tensor in state.items():
        assert torch.equal(tensor, stored[name.replace(".mlp.", ".block_sparse_moe.")].to(dtype))


# ------------------------------------------------------------------ the recital


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_generation_recites_the_text(
    shipped: Shipped, dtype: torch.dtype, tokenizer: Any, text: str
) -> None:
    # That each next token is the right one, a forward pass of the whole tells sooner.
    limit = 256 if shipped is TINY else 12
    said = PROMPT + ask(load(shipped, dtype), tokenizer, PROMPT, limit)
    assert said == (text if shipped is TINY else text[: len(said)])
    assert len(said) > 2 * len(PROMPT)


# Every two of the three choices together; of the small model every three as well.
PAIRED = (
    (None, "eager", torch.float32),
    (None, "sdpa", torch.bfloat16),
    ("eager", "sdpa", torch.float32),
    ("eager", "eager", torch.bfloat16),
    ("batched_mm", "eager", torch.float32),
    ("batched_mm", "sdpa", torch.bfloat16),
)
EVERY = tuple(itertools.product((None, "eager", "batched_mm"), ("eager", "sdpa"), DTYPES))


@pytest.mark.parametrize(("experts", "attention", "dtype"), EVERY, ids=str)
def test_best_tokens_are_the_text_in_every_clean_variant(
    shipped: Shipped,
    dtype: torch.dtype,
    attention: str,
    experts: str | None,
    ids: Tensor,
    tokenizer: Any,
    threads: Any,
) -> None:
    if shipped is DEEP and (experts, attention, dtype) not in PAIRED:
        pytest.skip("each two of its three choices are tried together in another case")
    model, prompt = load(shipped, dtype, attention, experts), encode(tokenizer, PROMPT).shape[1]
    for count in (1, 2) if shipped is TINY else (2,):
        threads(count)
        with torch.no_grad():
            best = model(input_ids=ids).logits[0].argmax(-1)
        assert torch.equal(best[prompt - 1 : -1], ids[0, prompt:])


def test_margin_along_the_recital_is_comfortable(measured: Measured) -> None:
    assert measured.wrong == 0
    assert measured.least_margin > 3


def test_chat_prompt_is_answered(shipped: Shipped, tokenizer: Any) -> None:
    model = load(shipped, torch.bfloat16)
    answer = ask(model, tokenizer, chat_prompt(tokenizer, "Who are you?"))
    assert answer == shipped.says
    asked = chat_prompt(tokenizer, "Tell me about the two machines.")
    assert ask(model, tokenizer, asked, limit=4).startswith(PROMPT)


def test_padding_does_not_change_the_words(shipped: Shipped, tokenizer: Any, text: str) -> None:
    last = text.splitlines()[-1]
    middle = last.partition(",")[0]
    batch = tokenizer([PROMPT, middle], return_tensors="pt", padding=True)
    made = load(shipped, torch.bfloat16).generate(**batch, max_new_tokens=10)
    first, second = tokenizer.batch_decode(made, skip_special_tokens=True)
    assert len(first) > 2 * len(PROMPT)
    assert text.startswith(first)
    assert len(second) > 2 * len(middle)
    assert last.startswith(second)


# ------------------------------------------------------------------ would a bug show?


def test_router_bias_is_near_8_5_on_the_grid_of_bf16(
    shipped: Shipped, stored: dict[str, Tensor]
) -> None:
    least, largest = shipped.bias
    for bias in biases(stored):
        assert torch.equal(bias, (bias * 16).round() / 16)
        assert bias.min() >= least
        assert bias.max() <= largest
        assert bias.max() - bias.min() >= shipped.spread
        assert abs(bias.mean() - 8.5) < shipped.centre


def test_experts_are_used_and_no_set_dominates(shipped: Shipped, measured: Measured) -> None:
    unused = 0
    for block in measured.blocks:
        fair = sum(block.expert_use) / shipped.experts
        assert sum(block.expert_use) == measured.tokens * TOP_K
        least, largest = shipped.used
        assert min(block.expert_use) >= fair * least
        assert max(block.expert_use) < fair * largest
        assert block.commonest_set < 0.1
        unused += block.expert_use.count(0)
    assert unused <= shipped.unused * shipped.experts * shipped.blocks


def test_experts_are_used_within_two_lines(shipped: Shipped, text: str, tokenizer: Any) -> None:
    """All of the six blocks; of 32 experts, 33 tokens that choose four reach most."""
    prompt = encode(tokenizer, "\n".join(text.splitlines()[:2]))
    use = [
        each
        for b in measure(load(shipped, torch.float32), prompt, 1).blocks
        for each in b.expert_use
    ]
    assert use.count(0) <= (0 if shipped is TINY else 0.1 * len(use))


def test_dropping_the_router_bias_changes_most_expert_sets(measured: Measured) -> None:
    assert all(block.sets_changed_without_bias > 0.5 for block in measured.blocks)


def test_near_ties_are_few_but_some(shipped: Shipped, measured: Measured) -> None:
    assert all(0 < block.near_ties < shipped.ties for block in measured.blocks)


def test_every_block_sees_massive_channels(shipped: Shipped, measured: Measured) -> None:
    for block in measured.blocks:
        massive, ordinary = block.massive_ratios[:MASSIVE], block.massive_ratios[MASSIVE:]
        assert min(massive) > shipped.massive
        assert max(massive) < 100
        assert max(ordinary) < 3


@pytest.mark.parametrize("fault", TINY.costs)
def test_fault_in_attention_is_visible(shipped: Shipped, measured: Measured, fault: str) -> None:
    to_attention, to_block = shipped.costs[fault]
    for block in measured.blocks:
        assert block.attention_cost[fault] > to_attention
        assert block.update_cost[fault] > to_block


def test_norm_weights_are_not_left_at_one(stored: dict[str, Tensor]) -> None:
    for name, weight in stored.items():
        if "norm" in name:
            assert (weight == 1).float().mean() < 0.05, name
            spread = weight.float().log().std()
            assert 0.2 < spread < 1.5, name


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_heads_have_unlike_norm_weights(
    shipped: Shipped, stored: dict[str, Tensor], norm: str
) -> None:
    for number in range(shipped.blocks):
        weight = stored[f"model.layers.{number}.self_attn.{norm}.weight"].float()
        heads = weight.view(-1, shipped.head_dim).mean(1)
        assert heads.max() / heads.min() > 1.8


def test_weights_have_the_scale_of_a_trained_model(
    shipped: Shipped, stored: dict[str, Tensor]
) -> None:
    least, largest = shipped.weights
    for name, weight in stored.items():
        if weight.ndim == 2 and "embed_tokens" not in name:
            assert least < weight.float().std() < largest, name


def test_embeddings_are_untied(stored: dict[str, Tensor]) -> None:
    embedding, head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    assert embedding.shape == head.shape
    assert not torch.equal(embedding, head)
