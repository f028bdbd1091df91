"""What stages hand on beside their state: shared keys and values, chosen tokens, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from folders import _save
from test_families import HANDING, port_of
from test_port_hf import padded_batch, run_all, stages
from transformers import AutoConfig
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from layerparity.anatomy.family import family_of
from layerparity.ground.errors import UserError
from layerparity.making.request.scope import Scope
from layerparity.model.architecture import read_config
from layerparity.model.layer_classes import classes_of
from layerparity.model.skeleton import Skeleton
from layerparity.ports.observed.handed import HANDED, Handing, take_out
from layerparity.ports.observed.observe import ObservedStage
from layerparity.ports.observed.proof import prove
from layerparity.selftest.models import make_model

Cli = Callable[..., Ended]
ON_CPU = ("backend=gpu", "device_map=cpu", "threads=1")
# As vendors publish them: the sizes that say who hands what to whom.
E2B = {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256}
E2B |= {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 1536}
PUBLISHED: dict[str, dict[str, Any]] = {"gemma4_text": E2B, "glm_moe_dsa": {"index_topk_freq": 4}}


def small(kind: str, folder: Path) -> Path:
    """A model whose weights have a trained one's scale, so that a wrong value shows."""
    changes = {k: v for k, v in HANDING[kind].items() if k not in ("vocab_size", "hidden_size")}
    return make_model(kind, folder, changes=changes)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_models_scopes_hold_what_its_blocks_take(kind: str) -> None:
    """The family says by config.json what was measured on a small model: they are two sources."""
    config = AutoConfig.for_model(kind, **PUBLISHED[kind])
    skeleton = Skeleton(read_config(config.to_dict()), torch.bfloat16, "eager", None)
    family = family_of(kind)
    proof, classes = prove(skeleton, family), classes_of(skeleton)
    assert (proof.unproved, proof.failed, proof.unmeasured) == ("", "", "")
    assert set(proof.kinds) == set(classes.values())
    several = 0
    for layer in range(config.num_hidden_layers):
        stage = f"layers.{layer}"
        scope = Scope("single", (stage,)).with_handers(family, config.to_dict())
        assert [*scope.stages[:-1]] == proof.handed.before(stage, skeleton.module, classes)
        several += len(scope.stages) > 1
    assert several > config.num_hidden_layers / 2


def test_glms_pattern_and_frequency_are_read_as_transformers_reads_them() -> None:
    family = family_of("glm_moe_dsa")
    assert family.handers is not None
    for asked in ({"index_topk_freq": 3}, {"index_topk_pattern": "FSSFSFSS"}, {}):
        said = {"num_hidden_layers": 8, **asked}
        config = AutoConfig.for_model("glm_moe_dsa", **said)
        whole = {"num_hidden_layers": 8, "indexer_types": config.indexer_types}
        for layer in range(8):
            assert family.handers(said, layer) == family.handers(whole, layer), (asked, layer)


@pytest.mark.parametrize(
    ("kind", "scope", "lacks"),
    [
        ("gemma4_text", ["layers.0"], "layers.0 takes what embed_tokens hands on"),
        ("gemma4_text", ["embed_tokens", "layers.4"], "layers.4 takes what layers.2 hands on"),
        ("gemma4_text", ["layers.5.self_attn"], "layers.5.self_attn takes what embed_tokens"),
        ("gemma4_text", ["layers.5.mlp"], ""),
        ("glm_moe_dsa", ["layers.3"], "take it in: scope=range start=2 end=3"),
        ("glm_moe_dsa", ["layers.2", "layers.3"], ""),
    ],
)
def test_a_port_refuses_a_scope_that_lacks_it(
    tmp_path: Path, kind: str, scope: list[str], lacks: str
) -> None:
    port = port_of(_save(AutoConfig.for_model(kind, **HANDING[kind]), tmp_path / "model", 0))
    if not lacks:
        port.place(scope)
        return
    with pytest.raises(UserError) as refusal:
        port.place(scope)
    assert lacks in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "stage", "scope", "gap"),
    [
        ("gemma4_text", "layers.0.mlp", ["layers.0.mlp"], False),
        ("gemma4_text", "layers.0", ["embed_tokens", "layers.0"], False),
        ("gemma4_text", "layers.1", ["embed_tokens", "layers.1"], True),
        (
            "gemma4_text",
            "layers.4.self_attn",
            ["embed_tokens", "layers.2", "layers.4.self_attn"],
            True,
        ),
        ("glm_moe_dsa", "layers.3.self_attn", ["layers.2", "layers.3.self_attn"], True),
        ("glm_moe_dsa", "layers.2.self_attn", ["layers.2.self_attn"], False),
    ],
)
def test_a_scope_takes_in_what_its_stage_takes_and_is_no_chain_with_gaps(
    kind: str, stage: str, scope: list[str], gap: bool
) -> None:
    """Of the embedding's values attention sees none; a component is fed by no stage before it."""
    taken = Scope("single", (stage,)).with_handers(family_of(kind), HANDING[kind])
    assert ([*taken.stages], taken.takes) == (scope, len(scope) > 1)
    if gap:
        with pytest.raises(UserError, match="hands on beside its state, and what is between them"):
            taken.refuse_gaps()
    else:
        taken.refuse_gaps()


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("gemma4_text", {"num_kv_shared_layers": "abc"}),
        ("gemma4_text", {"layer_types": 5}),
        ("glm_moe_dsa", {"indexer_types": 5}),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": "x"}),
        ("glm_moe_dsa", {"indexer_types": None, "index_skip_topk_offset": [2]}),
    ],
)
def test_odd_values_are_a_message(kind: str, odd: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"which blocks of {kind} hand on to others .*: check its"):
        Scope("single", ("layers.3",)).with_handers(family_of(kind), HANDING[kind] | odd)


def test_offloaded_blocks_hand_on_what_they_store(tmp_path: Path) -> None:
    """accelerate's hooks go on with copies of dictionaries."""
    from accelerate import cpu_offload

    config = AutoConfig.for_model("gemma4_text", **HANDING["gemma4_text"])
    port = port_of(_save(config, tmp_path / "model", 0))
    port.place(["embed_tokens", "layers.0", "layers.1", "layers.2"])
    port.skeleton.load(port.assets.checkpoint, "layers.2")
    block = port.skeleton.module("layers.2")
    arguments = {"position_embeddings": (torch.ones(1, 4, 16), torch.zeros(1, 4, 16))}
    handed = {HANDED: {"per_layer_input": torch.ones(1, 4, 16)}}
    for offloaded in (False, True):
        if offloaded:
            cpu_offload(block, execution_device="cpu")
        _, seen = ObservedStage(block, [])(torch.ones(1, 4, 64), {**arguments, **handed})
        assert {name.rpartition(" ")[0] for name in seen} == {
            "handed shared_kv_states sliding_attention"
        }, offloaded


def test_only_what_some_block_needs_is_kept(tmp_path: Path) -> None:
    """GLM-5's blocks all choose their own tokens: a run of it is resumed as any other."""
    settings = {**HANDING["glm_moe_dsa"], "indexer_types": ["full"] * 4}
    port = port_of(_save(AutoConfig.for_model("glm_moe_dsa", **settings), tmp_path / "model", 0))
    ids, call = padded_batch()
    port.place(stages(port))
    run_all(port, ids, call)
    assert call.handed == {}
    assert port.cached("layers.0") == {}


def test_what_is_handed_on_does_not_change_afterwards() -> None:
    """A cache goes on writing into the tensors that it gave out."""

    class Stores(torch.nn.Module):
        def forward(self, state: torch.Tensor, shared_kv_states: dict[str, Any]) -> torch.Tensor:
            shared_kv_states["full"] = (state, state + 1)
            return state

    state = torch.zeros(1, 2, 4)
    module = Stores()
    handing = Handing(module, {})
    seen = handing.handed_on(module(state, **handing.arguments))
    state += 5
    assert {name: float(v.max()) for name, v in take_out(seen).items()} == {
        "shared_kv_states full 0": 0.0,
        "shared_kv_states full 1": 1.0,
    }
    assert seen == {}


def moved_keys(module: Any, *args: Any, **named: Any) -> Any:
    """Attention that reads another block's keys and values one token too far."""
    if module.is_kv_shared_layer:
        shared = named.pop("shared_kv_states")
        moved = {kind: tuple(v.roll(1, 2) for v in pair) for kind, pair in shared.items()}
        named["shared_kv_states"] = moved
    return ATTENDS(module, *args, **named)


ATTENDS = modeling_gemma4.Gemma4TextAttention.forward
CHOOSES = modeling_glm_moe_dsa.GlmMoeDsaAttention.forward


def other_tokens(module: Any, *args: Any, **named: Any) -> Any:
    """Attention that takes the tokens that another block chose, each moved by one."""
    if module.skip_topk:
        named["prev_topk_indices"] = (named["prev_topk_indices"] - 1).clamp_min(0)
    return CHOOSES(module, *args, **named)


@pytest.mark.parametrize(
    ("kind", "owner", "wrong", "first"),
    [
        ("gemma4_text", modeling_gemma4.Gemma4TextAttention, moved_keys, "layers.3.self_attn"),
        ("glm_moe_dsa", modeling_glm_moe_dsa.GlmMoeDsaAttention, other_tokens, "layers.1.self_a"),
    ],
)
def test_a_wrong_hand_over_fails_where_it_is_taken(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    owner: type,
    wrong: Callable[..., Any],
    first: str,
) -> None:
    """A golden with decode steps; right candidates, one of a block alone; a wrong one."""
    run = (*ON_CPU, "model=checkpoint", f"model.path={small(kind, tmp_path)}")
    steps = (*run, "generate.max_new_tokens=3")
    made = cli(*steps, "kind=golden", "inputs=random", "seq_len=40", "dtype=float32", "name=golden")
    assert made.exit == 0, made.err
    fed = ("kind=candidate", "inputs=golden", "golden=golden", "dtype=bfloat16")
    assert cli(*steps, *fed, "name=right").exit == 0
    compared = cli("job=compare", "candidate=right")
    assert compared.exit == 0, compared.out
    # A golden that shows nothing of the embedding has all that its blocks take.
    bare = ("inputs=random", "seq_len=16", "dtype=bfloat16", 'capture.include=["layers.*:out"]')
    assert cli(*run, *bare, "kind=golden", "name=bare").exit == 0
    # One block alone: what hands on to it comes along.
    last = HANDING[kind]["num_hidden_layers"] - 1
    assert cli(*run, *fed, "scope=single", f"layer={last}", "name=alone").exit == 0
    compared = cli("job=compare", "golden=golden", "candidate=alone")
    assert "INCONCLUSIVE: only " in compared.out, "all that was compared passes"
    assert " fail " not in compared.out
    chained = cli(*run, *fed, "scope=single", f"layer={last}", "feed=chained")
    # The one before it is the one that hands on to GLM's last block; Gemma's are further away.
    gap = "what is between them is not in the scope: use inputs=golden" in chained.err
    assert (chained.exit, gap) == ((2, True) if kind == "gemma4_text" else (0, False))
    monkeypatch.setattr(owner, "forward", wrong)
    assert cli(*run, *fed, "name=wrong").exit == 0
    compared = cli("job=compare", "golden=golden", "candidate=wrong")
    assert compared.exit == 1, compared.out
    assert f"FAIL at {first}" in compared.out


def test_a_mistake_in_a_block_that_takes_keys_is_named(cli: Cli, tmp_path: Path) -> None:
    """The block is computed again with what the golden's blocks handed on."""
    run = (*ON_CPU, "model=checkpoint", f"model.path={small('gemma4_text', tmp_path)}")
    golden = ("kind=golden", "inputs=random", "seq_len=40", "capture=components", "dtype=float32")
    made = cli(*run, *golden)
    assert made.exit == 0, made.err
    fed = ("kind=candidate", "inputs=golden", "dtype=float32", "capture=components")
    planted = ("port=fault", "port.name=layer_norm_for_rms_norm", "port.layers=[4]")
    assert cli(*run, *fed, *planted).exit == 0
    compared = cli("job=compare")
    assert compared.exit == 1, compared.out
    assert "FAIL at layers.4.input_layernorm" in compared.out
    assert "shown (99 %): a LayerNorm stands where the model has an RMSNorm" in compared.out
