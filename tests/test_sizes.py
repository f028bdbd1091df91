"""Sizes: what a configuration says, against the modules that transformers builds of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from layerparity.anatomy.sizes import EXPERT_KEYS, ModelSizes, sizes_of
from layerparity.ground.errors import UserError
from layerparity.model.architecture import build, layout_of, read_config
from layerparity.model.layer_classes import experts_of
from layerparity.model.skeleton import Skeleton
from layerparity.model.twin import twins

# Their modules differ from what any key says, each in its own way.
_ODD = {
    # A key of experts, and without is_moe no expert is built.
    ("doge", "experts"),
    # Rows that are there for no token.
    *((kind, "vocabulary") for kind in ("cpmant", "mllama", "moshi")),
    # Linear attention, or attention with a gate beside the queries.
    *((kind, "queries") for kind in ("bailing_hybrid", "kimi_linear", "qwen3_5", "qwen3_5_text")),
    *((kind, "queries") for kind in ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")),
    # Blocks with a sliding window have KV heads of a number of their own.
    *((kind, "keys") for kind in ("bailing_hybrid", "kimi_linear", "inkling_text")),
    ("mimo_v2_flash", "keys"),
    # Half of an odd number of channels.
    ("glm4_moe", "rotary dims"),
}
# A multiple of the periods in which kinds of blocks come in turn: 2, 3, 4 and 6.
BLOCKS = 12


def built() -> Iterator[tuple[str, Any, nn.Module, list[nn.Module]]]:
    """Yield every family that transformers builds by stages from its defaults.

    Of more blocks than `BLOCKS` so many are built, where that is enough to say.
    """
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for fewer in ({"num_hidden_layers": BLOCKS}, {}):
            try:
                config = read_config({"model_type": kind})
                if fewer and (getattr(config, "num_hidden_layers", None) or 0) > BLOCKS:
                    config = read_config({"model_type": kind, **fewer})
                model = build(config, torch.bfloat16, "eager", None)
                blocks = model.get_submodule(layout_of(model).paths["layers"])
            except (UserError, AssertionError):
                continue
            yield kind, config, model, list(blocks.children())
            break


def of_modules(model: Any, blocks: list[nn.Module]) -> dict[str, int]:
    """Return the sizes of the modules themselves; the largest, where blocks differ."""
    rows, width = model.get_input_embeddings().weight.shape
    found = {"experts": max(map(experts_of, blocks)), "vocabulary": rows, "hidden": width}
    for block in blocks:
        for name, what in (("q_proj", "queries"), ("k_proj", "keys")):
            linear = getattr(getattr(block, "self_attn", None), name, None)
            if isinstance(linear, nn.Linear):
                found[what] = max(found.get(what, 0), linear.out_features)
    tables = (getattr(each, "inv_freq", None) for each in model.modules())
    dims = [2 * each.shape[-1] for each in tables if isinstance(each, torch.Tensor)]
    return found | ({"rotary dims": max(dims)} if dims else {})


def of_keys(sizes: ModelSizes) -> dict[str, int]:
    return {
        "experts": sizes.experts,
        "vocabulary": sizes.vocabulary,
        "hidden": sizes.hidden,
        "queries": sizes.heads * sizes.head_dim,
        "keys": sizes.kv_heads * sizes.head_dim,
        "rotary dims": sizes.rotary_dims,
    }


def test_what_the_keys_say_is_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers on the meta device have no values; to draw them takes a third of the time.
    for draw in ("kaiming_uniform_", "uniform_", "normal_"):
        monkeypatch.setattr(torch.nn.init, draw, lambda tensor, *_, **__: tensor)
    wrong, kinds, sparse = set(), set(), set()
    for kind, config, model, blocks in built():
        said = of_keys(sizes_of(config))
        kinds.add(kind)
        sparse |= {kind} if said["experts"] else set()
        differ = {what for what, size in of_modules(model, blocks).items() if said[what] != size}
        wrong |= {(kind, what) for what in differ}
    assert wrong == _ODD
    assert len(kinds) > 100 and len(sparse) > 30


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("qwen3_moe", "num_experts"),
        ("mixtral", "num_local_experts"),
        ("glm4_moe", "n_routed_experts"),
        ("aria_text", "moe_num_experts"),
    ],
)
def test_a_twin_has_fewer_experts_and_the_keys_say_how_many(kind: str, key: str) -> None:
    """By each of the names, so that none is forgotten by those who make it smaller."""
    assert key in EXPERT_KEYS
    shared = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 2000}
    values = {"model_type": kind, "num_hidden_layers": 2, key: 32, "head_dim": 64, **shared}
    skeleton = Skeleton(read_config(values), torch.float32, "eager", None)
    twin = next(iter(twins(skeleton)))
    assert sizes_of(skeleton.config).experts == 32
    assert sizes_of(twin.config).experts == max(map(experts_of, twin.blocks)) < 32
    assert sizes_of(twin.config).top_k < sizes_of(twin.config).experts


def test_a_file_and_what_transformers_makes_of_it_say_the_same() -> None:
    own = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300, "num_hidden_layers": 2}
    for values in (
        {"model_type": "minimax_m2", **own, "head_dim": 32, "rotary_dim": 16},
        {"model_type": "llama", **own, "intermediate_size": 96, "num_key_value_heads": 2},
        {"model_type": "phi", **own, "intermediate_size": 96, "partial_rotary_factor": 0.25},
    ):
        plain, read = sizes_of(values), sizes_of(read_config(values))
        for name in ("hidden", "heads", "head_dim", "rotary_dims", "vocabulary", "windows"):
            assert getattr(plain, name) == getattr(read, name), (values, name)
    parts = {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"moe_num_experts": 8, "moe_top_k": 3}}
    for values in ({**own, **parts}, read_config({"model_type": "dbrx", **own, **parts})):
        said = sizes_of(values)
        assert (said.kv_heads, said.experts, said.top_k, said.hidden) == (2, 8, 3, 64)
    assert sizes_of({}).head_dim == sizes_of({"hidden_size": "wide"}).hidden == 0


def test_blocks_that_differ_count_by_their_largest() -> None:
    config = read_config({"model_type": "gemma4_text"})
    assert config.is_heterogeneous
    assert sizes_of(config).head_dim == 512
