"""port=hf, stage by stage, computes to the bit what transformers computes in one forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from layerparity.anatomy.family import TAPS, family_of
from layerparity.backends.base import Backend
from layerparity.model.checkpoint import Checkpoint
from layerparity.ports.base import Assets, Call
from layerparity.ports.known import hf
from layerparity.ports.observed.canonical import laid_out
from layerparity.record.manifest import SitePatterns
from layerparity.settings.config import Config, DType

EVERYTHING = SitePatterns("components", ("*",))


class HostBackend(Backend):
    """The CPU without accelerate: the least a backend can be."""

    device_label = "cpu"

    def open(self) -> None: ...
    def close(self) -> None: ...
    def place(self, model, stages):
        return []

    def put(self, stage, module):
        module.to("cpu")

    def send(self, stage, value):
        return value

    def fetch(self, tensors):
        return {name: value.detach().contiguous() for name, value in tensors.items()}


def port_of(
    folder: Path, dtype: DType = DType.float32, wanted: SitePatterns = EVERYTHING
) -> hf.HfPort:
    checkpoint = Checkpoint(folder)
    config = Config(dtype=dtype)
    family = family_of(checkpoint.config["model_type"])
    return hf.HfPort(Assets(checkpoint, family, HostBackend(), config, wanted))


def stages(port: hf.HfPort) -> list[str]:
    blocks = [f"layers.{n}" for n in range(port.skeleton.config.num_hidden_layers)]
    return ["embed_tokens", *blocks, "norm", "lm_head"]


def run_all(port: hf.HfPort, ids: torch.Tensor, call: Call) -> tuple[torch.Tensor, dict]:
    port.begin(call)
    state, sites = ids, {}
    for stage in stages(port):
        port.load(stage)
        seen = port.run(stage, state)
        state = seen.output
        sites[stage] = seen
    return state, sites


def padded_batch() -> tuple[torch.Tensor, Call]:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 21, 22, 23, 24]])
    mask = (ids != 0).long()
    return ids, Call(mask, (mask.cumsum(-1) - 1).clamp(min=0))


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
def test_stages_equal_one_forward(made: Callable[[str], Path], family: str, dtype: DType) -> None:
    ids, call = padded_batch()
    logits, _ = run_all(port_of(made(family), dtype), ids, call)
    whole = AutoModelForCausalLM.from_pretrained(made(family), dtype=getattr(torch, dtype.value))
    with torch.no_grad():
        expected = whole(ids, attention_mask=call.attention_mask, position_ids=call.position_ids)
    assert torch.equal(logits, expected.logits)


def test_every_site_of_a_sparse_block_is_seen(made: Callable[[str], Path]) -> None:
    ids, call = padded_batch()
    _, seen = run_all(port_of(made("minimax_m2")), ids, call)
    block = seen["layers.1"]
    assert block.unseen == {}
    shapes = {local: tuple(value.shape) for local, value in block.tensors.items()}
    assert shapes["self_attn:q_rotated"] == (2, 7, 4, 16)
    assert shapes["self_attn:k_rotated"] == (2, 7, 2, 16)
    assert shapes["self_attn:context"] == (2, 7, 4, 16)
    assert shapes["mlp.gate:logits"] == (2, 7, 4)
    assert shapes["mlp.gate:choices"] == (2, 7, 2)
    assert shapes["mlp.experts:out"] == (2, 7, 64)
    for local, value in block.tensors.items():
        assert len(block.specs[local].axes) == value.dim()


def test_routing_is_sorted_by_expert_and_weights_follow(made: Callable[[str], Path]) -> None:
    ids, call = padded_batch()
    port = port_of(made("minimax_m2"))
    _, seen = run_all(port, ids, call)
    choices = seen["layers.0"].tensors["mlp.gate:choices"]
    weights = seen["layers.0"].tensors["mlp.gate:weights"]
    logits = seen["layers.0"].tensors["mlp.gate:logits"]
    assert bool((choices.diff(dim=-1) > 0).all())
    scores = logits.sigmoid().gather(-1, choices)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True), atol=1e-6)


def test_rotary_is_partial(made: Callable[[str], Path]) -> None:
    """The second half of each head passes the rotation unchanged."""
    ids, call = padded_batch()
    _, seen = run_all(port_of(made("minimax_m2")), ids, call)
    block = seen["layers.0"].tensors
    plain = block["self_attn.q_norm:out"].view(2, 7, 4, 16)
    rotated = block["self_attn:q_rotated"]
    assert torch.equal(rotated[..., 8:], plain[..., 8:])
    assert not torch.equal(rotated[:, -1, :, :8], plain[:, -1, :, :8])


def test_a_dense_block_has_no_router_sites(made: Callable[[str], Path]) -> None:
    ids, call = padded_batch()
    _, seen = run_all(port_of(made("qwen3_moe")), ids, call)
    assert "mlp.gate:logits" in seen["layers.0"].tensors
    assert "mlp.gate:logits" not in seen["layers.1"].tensors
    assert seen["layers.1"].unseen == {}


def test_hooks_change_nothing_and_stay_nowhere(made: Callable[[str], Path]) -> None:
    ids, call = padded_batch()
    port = port_of(made("minimax_m2"))
    watched, _ = run_all(port, ids, call)
    bare, _ = run_all(port_of(made("minimax_m2"), wanted=SitePatterns("none", ())), ids, call)
    assert torch.equal(watched, bare)
    hooked = [
        name
        for name, module in port.skeleton.model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    assert hooked == []


@pytest.mark.parametrize("family", ["minimax_m2", "llama"])
def test_static_cache_decode_equals_generate(made: Callable[[str], Path], family: str) -> None:
    ids, call = padded_batch()
    port = port_of(made(family))
    call.cache = port.new_cache(2, 12)
    logits, _ = run_all(port, ids, call)
    tokens = [logits[:, -1].argmax(-1, keepdim=True)]
    mask = call.attention_mask
    for _ in range(4):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        port.begin(Call(mask, mask.sum(-1, keepdim=True) - 1, call.cache))
        state = tokens[-1]
        for stage in stages(port):
            state = port.run(stage, state).output
        tokens.append(state[:, -1].argmax(-1, keepdim=True))
    whole = AutoModelForCausalLM.from_pretrained(made(family), dtype=torch.float32)
    expected = whole.generate(
        ids,
        attention_mask=call.attention_mask,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
    )
    assert torch.equal(torch.cat(tokens, 1), expected[:, 7:])


@pytest.mark.parametrize("family", ["minimax_m2", "llama"])
def test_blocks_decode_without_the_first_one(made: Callable[[str], Path], family: str) -> None:
    """Blocks 1 and 2 alone, each pass fed what the whole model fed them: the same masks."""
    ids, call = padded_batch()
    whole, alone = port_of(made(family)), port_of(made(family))
    passes = [call, *(following(call, steps) for steps in (1, 2, 3))]
    states = [ids, *(ids[:, :1] + steps for steps in (1, 2, 3))]
    kept = [port.new_cache(2, 10) for port in (whole, alone)]
    for port in (whole, alone):
        for stage in stages(port):
            port.load(stage)
    for each, tokens in zip(passes, states, strict=True):
        state = tokens
        for port, cache in zip((whole, alone), kept, strict=True):
            port.begin(Call(each.attention_mask, each.position_ids, cache))
        for stage in stages(whole)[:4]:
            given, state = state, whole.run(stage, state).output
            if stage in ("layers.1", "layers.2"):
                assert torch.equal(alone.run(stage, given).output, state)


@pytest.mark.parametrize("window", [None, 5], ids=["all kept", "a window kept"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_keys_are_those_of_the_pass(static: bool, window: int | None) -> None:
    """Whatever a cache gives attention to read: in it, each token's keys are its own number."""
    from transformers import cache_utils

    made = {
        (True, None): lambda: cache_utils.StaticLayer(12),
        (True, 5): lambda: cache_utils.StaticSlidingWindowLayer(12, sliding_window=5),
        (False, None): cache_utils.DynamicLayer,
        (False, 5): lambda: cache_utils.DynamicSlidingWindowLayer(sliding_window=5),
    }
    kept, (_, call) = made[static, window](), padded_batch()
    (tap,) = [tap for tap in TAPS if tap.attention == "key"]
    first = 0
    for each in (call, *(following(call, steps) for steps in (1, 2, 3, 4))):
        numbers = torch.arange(first, first + each.tokens).float()
        new = numbers[None, None, :, None].expand(2, 3, -1, 4)
        keys, _ = kept.update(new, new)
        assert torch.equal(laid_out(tap, keys, each), new.transpose(1, 2))
        first += each.tokens


def following(call: Call, steps: int) -> Call:
    """Return the decode step that many tokens after a prefill."""
    more = torch.ones(call.batch, steps, dtype=torch.long)
    mask = torch.cat([call.attention_mask, more], 1)
    return Call(mask, mask.sum(-1, keepdim=True) - 1)


def test_a_component_runs_alone(made: Callable[[str], Path]) -> None:
    """Fed what the block gave them, a block's components give what they gave in the block."""
    ids, call = padded_batch()
    port = port_of(made("minimax_m2"))
    _, seen = run_all(port, ids, call)
    block = seen["layers.2"].tensors
    alone = port_of(made("minimax_m2"))
    alone.begin(call)
    for stage, given in {
        "layers.2.mlp": "post_attention_layernorm:out",
        "layers.2.self_attn": "input_layernorm:out",
        "layers.2.post_attention_layernorm": "post_attention_layernorm:in",
    }.items():
        used = alone.load(stage)
        inside = stage.removeprefix("layers.2.")
        got = alone.run(stage, block[given])
        assert torch.equal(got.output, block[f"{inside}:out"])
        assert used and all("layers.2." in name for name in used)


def test_only_the_stage_is_read(made: Callable[[str], Path]) -> None:
    port = port_of(made("minimax_m2"))
    used = port.load("layers.1")
    assert all(".layers.1." in name for name in used)
    elsewhere = port.skeleton.model.get_submodule("model.layers.0")
    assert all(value.is_meta for value in elsewhere.parameters())
    port.release("layers.1")
    assert all(value.is_meta for value in port.skeleton.module("layers.1").parameters())


@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
def test_released_stages_give_the_same_bits_again(made: Callable[[str], Path], family: str) -> None:
    """One stage in memory at a time, and the whole model twice, as a sweep over prompts would."""
    ids, call = padded_batch()
    expected, _ = run_all(port_of(made(family)), ids, call)
    port = port_of(made(family))
    for _ in range(2):
        port.begin(call)
        state = ids
        for stage in stages(port):
            port.load(stage)
            state = port.run(stage, state).output
            port.release(stage)
        assert torch.equal(state, expected)
        assert all(value.is_meta for value in port.skeleton.model.parameters())


def test_bf16_keeps_the_router_bias_in_float32(made: Callable[[str], Path]) -> None:
    port = port_of(made("minimax_m2"), DType.bfloat16)
    port.load("layers.0")
    kept = port.skeleton.module("layers.0").mlp
    assert kept.e_score_correction_bias.dtype == torch.float32
    assert kept.gate.weight.dtype == torch.bfloat16
