"""What a model of vLLM Neuron's is given: a configuration, requests, a paged cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from layerparity.ground.errors import UserError
from layerparity.ports.base import Call
from layerparity.ports.ranks.side import Held
from layerparity.ports.vllm_neuron.configuration import configured
from layerparity.ports.vllm_neuron.heads import of_own_queries
from layerparity.ports.vllm_neuron.passes import Pages, passes_of

# Two rows of three and of two tokens, the second one padded.
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])
PLACES = torch.tensor([[0, 1, 2], [1, 0, 1]])
PAGES = Pages.holding(2, 5, 2)


def test_blocks_of_requests_lie_between_each_others_and_the_null_block_is_nobodys() -> None:
    assert PAGES.tables().tolist() == [[6, 4, 2], [5, 3, 1]]
    rows, places = torch.tensor([0, 0, 1]), torch.tensor([0, 3, 4])
    assert PAGES.slots(rows, places).tolist() == [12, 9, 2]
    spec = SimpleNamespace(num_kv_heads=1, head_size=4, dtype=torch.bfloat16)
    keys, values = PAGES.cache(spec)
    assert (keys.shape, keys.dtype) == (torch.Size([7, 1, 2, 4]), torch.bfloat16)
    # Whoever reads what no request wrote finds numbers.
    assert bool((keys != 0).all())
    assert not torch.equal(keys, values)


def test_a_prompt_is_given_alone_padded_behind_to_a_multiple_of_the_ranks() -> None:
    first, second = passes_of(Call(MASK, PLACES), PAGES, ranks=2)
    assert (first.tokens, first.told["max_query_len"]) == (4, 4)
    assert first.positions.tolist() == [0, 1, 2, 2]
    assert first.told["slot_mapping"].tolist() == [12, 13, 8, 0]
    assert second.positions.tolist() == [0, 1, 1, 1]
    assert second.told["block_table_tensor"].tolist() == [[5, 3, 1]]
    ids = torch.tensor([[7, 8, 9], [0, 5, 6]])
    assert first.taken(ids).tolist() == [7, 8, 9, 9]
    assert second.taken(ids).tolist() == [5, 6, 6, 6]


def test_a_prompt_of_one_token_is_no_step() -> None:
    (only,) = passes_of(Call(MASK[:1, :1], PLACES[:1, :1]), PAGES, ranks=1)
    assert only.tokens == 2
    assert only.told["max_query_len"] > only.told["decode_token_threshold"]


def test_each_ranks_slice_is_put_where_its_tokens_stand() -> None:
    _, second = passes_of(Call(MASK, PLACES), PAGES, ranks=2)
    whole = torch.zeros(2, 3, 1)
    second.put(whole, torch.tensor([[1.0], [2.0]]), first=0)
    assert whole[:, :, 0].tolist() == [[0, 0, 0], [0, 1, 2]]
    # The other rank has padding alone.
    second.put(whole, torch.tensor([[3.0], [4.0]]), first=2)
    assert whole[:, :, 0].tolist() == [[0, 0, 0], [0, 1, 2]]


def test_a_step_is_one_token_of_each_request() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    (step,) = passes_of(Call(mask, torch.tensor([[3], [2]])), PAGES, ranks=2)
    assert (step.tokens, step.told["max_query_len"]) == (2, 1)
    assert step.told["cached_seq_len"].tolist() == [3, 2]
    assert step.told["slot_mapping"].tolist() == [9, 6]
    assert step.taken(torch.tensor([[7], [8]])).tolist() == [7, 8]


def held(name: str, rows: range, heads: int) -> tuple[str, Held]:
    """Return what a rank holds of a projection to heads of two channels: those of some heads."""
    mask = torch.zeros(heads, 2, 3, dtype=torch.bool)
    mask[list(rows)] = True
    values = torch.arange(heads * 6.0).reshape(heads * 2, 3)
    return f"layers.0.self_attn.{name}.weight", Held(values, mask.flatten(0, 1), "qkv", False)


@pytest.mark.parametrize(
    ("queries", "keys", "differs"),
    [
        (range(1), range(1), False),
        (range(2, 4), range(1, 2), False),
        (range(4), range(2), False),
        (range(1, 2), range(1, 2), True),
        (range(2, 4), range(1), True),
    ],
)
def test_keys_are_those_that_the_ranks_queries_read(
    queries: range, keys: range, differs: bool
) -> None:
    """Four heads of queries, of which two read each head of keys."""
    own = dict([held("q_proj", queries, 4), held("k_proj", keys, 2)])
    found = of_own_queries(own, heads=4, keys=2)
    name = "layers.0.self_attn.k_proj.weight"
    assert found[name].differs is differs
    if differs:
        # The head that is there stands where the other one should.
        other = 2 * (1 - keys[0])
        assert found[name].mask.any(1).nonzero().flatten().tolist() == [other, other + 1]
        here = own[name].values[own[name].mask]
        assert torch.equal(found[name].values[found[name].mask], here)


def test_a_block_is_configured_as_if_all_blocks_were_like_it() -> None:
    """It may look up by its own number what is listed, or as the first one."""
    told = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [1]}
    told |= {"vocab_size": 1000, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    checkpoint = SimpleNamespace(config=told)
    block = configured(checkpoint, "layers.1", torch.bfloat16, ranks=2)
    assert (block.num_hidden_layers, block.mlp_only_layers) == (1, [0, 1, 2])
    assert (block.dtype, block.vocab_size) == (torch.bfloat16, 128)
    block = configured(checkpoint, "layers.2", torch.float32, ranks=2)
    assert block.mlp_only_layers == []
    assert block.layer_types == ["sliding_attention"] * 3
    head = configured(checkpoint, "lm_head", torch.float32, ranks=2)
    assert (head.num_hidden_layers, head.vocab_size) == (0, 1000)


def test_quantised_weights_are_refused() -> None:
    checkpoint = SimpleNamespace(config={"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UserError, match=r"quantised, .*: convert it first: job=convert"):
        configured(checkpoint, "layers.0", torch.bfloat16, ranks=1)
