"""Any architecture: its stages are the model, to the bit or nearly, or the run is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Ended
from folders import SHARED, _save
from judging.port import MutationPort
from safetensors.torch import load_file, save_file
from test_port_hf import HostBackend, padded_batch, run_all, stages
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from layerparity.anatomy.family import WEIGHED, Family, family_of
from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.making.request.scope import num_layers_of
from layerparity.model.architecture import read_config, usual_attention, usual_names
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.layer_classes import classes_of
from layerparity.model.skeleton import Skeleton
from layerparity.model.twin import twins
from layerparity.ports.base import Assets, Call
from layerparity.ports.known import hf
from layerparity.ports.observed import proof
from layerparity.record.manifest import SitePatterns
from layerparity.record.verdict import FILE_NAME, Outcome, Verdict
from layerparity.selftest.models import make_model
from layerparity.settings.config import Config

DENSE = {**SHARED, "intermediate_size": 96}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {**DENSE, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": SLIDING}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
OPT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
}
# The configurations of its parts are none of its own, and its experts' width follows from d_model.
DBRX = {
    "vocab_size": 300,
    "d_model": 64,
    "n_heads": 8,
    "n_layers": 3,
    "attn_config": {"kv_n_heads": 4, "clip_qkv": 0.5, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}
# Blocks that take more of others than their state.
HANDING: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **DENSE,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 16,
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": 8,
    },
    "glm_moe_dsa": {
        **DENSE,
        **LATENT,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared"] * 2,
        "index_topk": 6,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
KNOWN: dict[str, dict[str, Any]] = {
    "mistral": {**DENSE, "sliding_window": 8},
    "qwen2": DENSE,
    "qwen3": DENSE,
    "gemma": DENSE,
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "final_logit_softcapping": 3.0},
    "olmo2": DENSE,
    "granite": {**DENSE, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "granitemoe": {**DENSE, "num_local_experts": 4, "embedding_multiplier": 3.0},
    "cohere": {**DENSE, "logit_scale": 0.25},
    "cohere2": {**DENSE, "logit_scale": 0.25, "layer_types": SLIDING, "sliding_window": 8},
    "starcoder2": DENSE,
    "deepseek_v3": {**DENSE, **LATENT},
    "lfm2": {**DENSE, "block_ff_dim": 96, "layer_types": ["conv", "full_attention", "conv"]},
    "phi": DENSE,
    "gpt_neox": DENSE,
    "persimmon": DENSE,
    "gpt_oss": {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "nanochat": {**DENSE, "final_logit_softcapping": 3.0},
    "vaultgemma": {**GEMMA, "final_logit_softcapping": 3.0},
    "falcon_h1": {
        **DENSE,
        **MIXER,
        "mamba_d_ssm": 128,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.25, 2.0, 1.5, 0.75],
    },
    "bamba": {**DENSE, **MIXER, "attn_layer_indices": [1]},
    "gpt2": DENSE,
    "gpt_bigcode": DENSE,
    "bloom": DENSE,
    "gemma4_text": HANDING["gemma4_text"],
    "glm_moe_dsa": HANDING["glm_moe_dsa"],
    "opt": OPT,
    "dbrx": DBRX,
}
MIXED = {"jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}}
EAGER = ("gemma2", "gpt_oss", "vaultgemma", "mamba", "bloom")
Make = Callable[[str], Path]
Cli = Callable[..., Ended]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    base = tmp_path_factory.mktemp("families")

    def made(name: str) -> Path:
        folder = base / name
        settings = KNOWN.get(name, DENSE)
        return (
            folder if folder.is_dir() else _save(AutoConfig.for_model(name, **settings), folder, 0)
        )

    return made


def attention(name: str) -> str:
    return "eager" if name in EAGER else "sdpa"


def port_of(folder: Path, family: Family | None = None) -> hf.HfPort:
    checkpoint = Checkpoint(folder)
    kind = checkpoint.config["model_type"]
    wanted = SitePatterns("components", ("*",))
    return hf.HfPort(Assets(checkpoint, family or family_of(kind), HostBackend(), Config(), wanted))


def forward(name: str, folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return what transformers computes without a cache, [batch, token, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention(name)
    ).eval()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        logits: torch.Tensor = model(ids, **given).logits
    return logits


@pytest.mark.parametrize("name", KNOWN)
def test_the_stages_are_the_model(make: Make, name: str) -> None:
    ids, call = padded_batch()
    port = port_of(make(name))
    port.place(stages(port))
    assert port.assets.backend.warnings == []
    logits, seen = run_all(port, ids, call)
    expected = forward(name, make(name), ids, call.attention_mask)
    real = call.attention_mask.bool()
    assert torch.allclose(logits[real], expected[real], rtol=0, atol=1e-5 * expected.abs().max())
    for block in (seen["layers.0"], seen["layers.1"]):
        for local, value in block.tensors.items():
            assert value.shape[:2] == ids.shape, (local, value.shape)
            assert value.dim() == len(block.specs[local].axes)


@pytest.mark.parametrize("name", KNOWN)
def test_decoding_with_a_cache_is_the_model(make: Make, name: str) -> None:
    """Six steps: past the window of those that slide (8 tokens)."""
    ids, call = padded_batch()
    port = port_of(make(name))
    call.cache = port.new_cache(2, 13)
    run_all(port, ids, call)
    mask, given, ours = call.attention_mask, ids, []
    for step in range(6):
        token = torch.tensor([[30 + step], [40 + step]])
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        given = torch.cat([given, token], 1)
        port.begin(Call(mask, mask.sum(-1, keepdim=True) - 1, call.cache))
        state = token
        for stage in stages(port):
            state = port.run(stage, state).output
        ours.append(state)
    expected = forward(name, make(name), given, mask)[:, 7:]
    assert torch.allclose(torch.cat(ours, 1), expected, rtol=0, atol=1e-5 * expected.abs().max())


def test_blocks_without_a_static_cache_are_said(make: Make) -> None:
    port = port_of(make("qwen2"))
    port.skeleton.config.layer_types = ["compressed_sparse_attention"] * 3
    with pytest.raises(UserError, match="for which transformers has no static cache: leave gen"):
        port.new_cache(1, 8)


def decays_as_computed(folder: Path) -> None:
    """Write MiniMax's decay tables in float32, as its class computes them.

    The prefill reads the tables and a decode step the slope: rounded to bfloat16, as they are in
    a bfloat16 checkpoint, the two are 1e-3 apart in transformers itself.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    config = AutoConfig.from_pretrained(folder)
    computed = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, value in computed.named_buffers():
        if name in tensors:
            tensors[name] = value.contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["mamba", "jamba", "minimax"])
def test_a_state_goes_on_from_the_prefill(tmp_path: Path, name: str) -> None:
    """Padded rows and all; a state that is lost after the prefill gives other logits."""
    ids, call = padded_batch()
    folder = make_model(name, tmp_path, changes=MIXED.get(name))
    decays_as_computed(folder)
    port = port_of(folder)
    expected = []
    for lost in (False, True):
        call.cache = port.new_cache(2, 9)
        run_all(port, ids, call)
        if lost:
            call.cache = port.new_cache(2, 9)
        mask = torch.cat([call.attention_mask, torch.ones(2, 1, dtype=torch.long)], 1)
        port.begin(Call(mask, mask.sum(-1, keepdim=True) - 1, call.cache))
        state = torch.tensor([[30], [40]])
        for stage in stages(port):
            state = port.run(stage, state).output
        expected.append(state)
    longer = torch.cat([ids, torch.tensor([[30], [40]])], 1)
    whole = forward(name, tmp_path / name, longer, mask)[:, -1:]
    assert (expected[0] - whole).norm() <= 1e-5 * whole.norm()
    assert (expected[1] - whole).norm() > 1e-2 * whole.norm()


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "cohere", "deepseek_v3", "llama", "qwen3_moe"])
def test_components_are_fed_what_the_model_feeds_them(make: Make, made: Make, name: str) -> None:
    """OLMo 2 norms after attention, Gemma 2 twice, Cohere's halves share one norm."""
    folder = make(name) if name in KNOWN else made(name)
    ids, call = padded_batch()
    whole = port_of(folder)
    _, seen = run_all(whole, ids, call)
    family, block = whole.assets.family, seen["layers.1"].tensors
    alone = port_of(folder)
    alone.begin(call)
    for component in ("attention", "moe"):
        stage = family.stage(component, 1)
        local = family.input_sites(stage, 3)[0].local
        assert local in block
        alone.load(stage)
        output = alone.run(stage, block[local]).output
        assert torch.equal(output, block[f"{Site(stage, 'in').component}:out"])


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_an_embedding_that_scales_rounds_and_is_judged_as_what_rounds(
    cli: Cli, make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Gemma's factor itself is rounded to the type of a run: a copy would have to be equal."""
    run = ("backend=gpu", "device_map=cpu", "threads=1")
    run = (*run, "model=checkpoint", f"model.path={make(name)}")
    # Each candidate is a chain in bfloat16; no component is run alone.
    needed = ("reference.dtypes=[bfloat16]", "reference.components=false")
    golden = cli(*run, "dtype=float32", "inputs=random", "seq_len=20", *needed, "name=golden")
    assert golden.exit == 0, golden.err
    candidate = (*run, "dtype=bfloat16", "inputs=golden", "kind=candidate", "feed=chained")
    assert cli(*candidate, "name=right").exit == 0
    compared = cli("job=compare", "candidate=right")
    assert compared.exit == 0, compared.out
    rows = torch.nn.functional.embedding
    monkeypatch.setattr(
        torch.nn.functional, "embedding", lambda *args, **named: rows(*args, **named) * 1.03
    )
    assert cli(*candidate, "name=wrong").exit == 0
    compared = cli("job=compare", "candidate=wrong")
    assert compared.exit == 1, compared.out
    assert "embed_tokens is the first wrong place" in compared.out


def test_gpt_oss_shows_its_router_at_the_canonical_sites(make: Make) -> None:
    """The router is `mlp.router` there; two kinds of attention, sinks in both."""
    ids, call = padded_batch()
    port = port_of(make("gpt_oss"))
    _, seen = run_all(port, ids, call)
    assert port.skeleton.config._attn_implementation == "eager"
    for stage in ("layers.0", "layers.1"):
        block = seen[stage]
        assert block.unseen == {}
        logits, choices = block.tensors["mlp.gate:logits"], block.tensors["mlp.gate:choices"]
        assert torch.equal(choices, logits.topk(2).indices.sort().values)
        weights = logits.gather(-1, choices).softmax(-1)
        assert torch.allclose(block.tensors["mlp.gate:weights"], weights, atol=1e-6)
        assert block.tensors["mlp.experts:out"].shape == block.tensors["mlp:out"].shape
        assert not any("router" in local for local in block.tensors)


def test_a_router_that_passes_groups_over_is_judged_by_its_scores(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3 chooses groups of experts first; what it passes over scores -Inf."""
    run = ("backend=gpu", "device_map=cpu", "scope=range", "start=0", "end=1", "threads=1")
    run = (*run, "model=checkpoint", f"model.path={make_model('deepseek_v3', tmp_path)}")
    assert cli(*run, "dtype=bfloat16", "inputs=random", "seq_len=48").exit == 0
    fed = (*run, "dtype=bfloat16", "inputs=golden", "kind=candidate")
    assert cli(*fed, "port=clean", "port.name=backwards").exit == 0
    compared = cli("job=compare")
    assert compared.exit == 0, compared.out
    choose = DeepseekV3TopkRouter.forward

    def without_bias(router: DeepseekV3TopkRouter, hidden: torch.Tensor) -> Any:
        own = router.e_score_correction_bias
        router.e_score_correction_bias = torch.zeros_like(own)
        chosen = choose(router, hidden)
        router.e_score_correction_bias = own
        return chosen

    monkeypatch.setattr(DeepseekV3TopkRouter, "forward", without_bias)
    assert cli(*fed).exit == 0
    assert cli("job=compare").exit == 1
    newest = max(tmp_path.rglob(FILE_NAME), key=lambda path: path.stat().st_mtime)
    verdict = Verdict.from_json(newest.read_text(encoding="utf-8"))
    (row,) = (each for each in verdict.rows if str(each.site) == "layers.1.mlp.gate:choices")
    assert row.outcome is Outcome.FAIL


def refused(port: hf.HfPort, scope: list[str]) -> str:
    with pytest.raises(UserError) as raised:
        port.place(scope)
    return str(raised.value)


def test_what_happens_between_stages_is_refused(make: Make) -> None:
    """Granite without its family file, which knows the multipliers: any model nobody looked at."""
    unknown = replace(family_of("granite"), after={})
    proof._proved.clear()
    port = port_of(make("granite"), unknown)
    said = refused(port, stages(port))
    assert "between embed_tokens and layers" in said
    assert "port._target_" in said
    assert "between lm_head and logits" in refused(port, ["norm", "lm_head"])
    port.place(["layers.0", "layers.1"])
    port.place(["layers.2", "norm"])
    proof._proved.clear()


def test_a_wrong_factor_is_seen(make: Make) -> None:
    """One part in a thousand."""
    proof._proved.clear()
    wrong = {"lm_head": lambda value, config: value * config.logit_scale * 1.001}
    port = port_of(make("cohere"), replace(family_of("cohere"), after=wrong))
    assert "between lm_head and logits" in refused(port, ["lm_head"])
    proof._proved.clear()


def test_positions_between_stages_are_refused(make: Make) -> None:
    port = port_of(make("biogpt"))
    assert "between embed_tokens and layers" in refused(port, stages(port))
    _, call = padded_batch()
    port.place(["layers.1"])
    port.begin(call)
    port.load("layers.1")
    assert port.run("layers.1", torch.randn(2, 7, 64)).output.shape == (2, 7, 64)


@pytest.mark.parametrize(
    "kind", ["minimax_m2", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_moe", "granite"]
)
def test_a_large_model_is_proved_on_a_small_twin(kind: str) -> None:
    config = read_config({"model_type": kind})
    skeleton = Skeleton(config, torch.bfloat16, attention(kind), None)
    assert sum(each.numel() for each in skeleton.model.parameters()) > 2e9
    assert sum(each.numel() for each in next(twins(skeleton)).model.parameters()) < 3e7
    shown = proof.prove(skeleton, family_of(kind))
    assert replace(shown, kinds={}, apart=set()) == proof.Proof()
    assert shown.apart >= {f"layers.{name}" for name in ("input_layernorm", "mlp")}
    assert shown.kinds and all(each.block.measured for each in shown.kinds.values())


def test_a_component_that_mixes_tokens_is_not_given_two_batches() -> None:
    """Doge's router views its logits [2, token, key]: two batches are no batch twice as long."""
    for mixes in (False, True):
        config = read_config(
            {"model_type": "doge", "is_moe": mixes, "num_experts": 16, "num_experts_per_tok": 4}
        )
        shown = proof.prove(Skeleton(config, torch.float32, "eager", None), family_of("doge"))
        assert ("layers.mlp" in shown.apart) is not mixes
        assert "layers.input_layernorm" in shown.apart


def test_a_twin_has_every_kind_of_block() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = read_config({"model_type": "gemma3_text", "num_hidden_layers": 24})
    assert config.layer_types[:6] == kinds
    (twin, *_) = twins(Skeleton(config, torch.bfloat16, "sdpa", None))
    assert set(twin.config.layer_types) == set(kinds)
    assert len(twin.blocks) < 10


def test_a_model_that_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    settings = {**DENSE, "num_local_experts": 2, "num_experts_per_tok": 3}
    folder = _save(AutoConfig.for_model("mixtral", **settings), tmp_path / "model", 0)
    port = port_of(folder)
    assert "cannot be run by stages (RuntimeError: selected index k" in refused(port, stages(port))


def test_blocks_whose_takings_cannot_be_handed_on_are_refused_by_name(tmp_path: Path) -> None:
    settings = {**DENSE, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = AutoConfig.for_model("zaya", **{**settings, "router_hidden_size": 16, "head_dim": 16})
    port = port_of(_save(config, tmp_path / "model", 0))
    said = refused(port, stages(port))
    assert "cannot be run by stages: its blocks take prev_router_hidden_states from else" in said


def test_attention_that_a_family_lacks_is_said() -> None:
    with pytest.raises(UserError, match=r"gemma2 has no sdpa .* use attn_implementation=eager"):
        Skeleton(read_config({"model_type": "gemma2", **GEMMA}), torch.float32, "sdpa", None)


@pytest.mark.parametrize(
    ("kind", "usual"), [("mimo_v2_flash", "eager"), ("mamba", "eager"), ("llama", "sdpa")]
)
def test_a_model_without_sdpa_takes_eager_by_itself(tmp_path: Path, kind: str, usual: str) -> None:
    port = port_of(make_model(kind, tmp_path))
    port.place(stages(port))
    assert port.skeleton.model.config._attn_implementation == usual
    assert usual_attention(port.skeleton.config.model_type) == usual


def test_another_layout_is_said() -> None:
    config = read_config({"model_type": "longcat_flash"})
    with pytest.raises(UserError, match="not laid out as embedding, blocks, norm and head"):
        Skeleton(config, torch.float32, "sdpa", None)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ({"model_type": "gpt2", "n_layer": 3, "n_embd": 64}, 3),
        ({"model_type": "bloom", "n_layer": 2}, 2),
        ({"model_type": "nemotron_h", "layers_block_type": ["moe", "mlp", "full_attention"]}, 3),
        ({"model_type": "llama", "num_hidden_layers": 5, "n_layer": 9}, 5),
    ],
)
def test_the_blocks_are_counted_under_any_name(values: dict[str, Any], blocks: int) -> None:
    assert num_layers_of(usual_names(values)) == blocks


def test_what_counts_no_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"made_up counts no blocks"):
        num_layers_of(usual_names({"model_type": "made_up"}))


def test_infinities_in_a_config_are_read() -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    config = read_config({"model_type": "bamba", "time_step_limit": limit})
    assert tuple(config.time_step_limit) == (0.0, float("inf"))


def test_a_config_that_makes_no_sense_is_one_line() -> None:
    with pytest.raises(UserError, match="says hidden_size = 'wide', and a llama wants") as raised:
        read_config({"model_type": "llama", "hidden_size": "wide"})
    assert "\n" not in str(raised.value)


def test_a_family_without_a_file_through_the_door(
    cli: Callable[..., Ended], make: Make, tmp_path: Path
) -> None:
    (tmp_path / "ids.json").write_text("[[5, 6, 7, 8, 9], [20, 21, 22]]")
    shared = ("backend=gpu", "device_map=cpu", "model=checkpoint", f"model.path={make('olmo2')}")
    tokens = ("inputs=tokens", "inputs.file=ids.json", "capture=components")
    golden = cli(*shared, *tokens, "reference.make=false")
    assert golden.exit == 0, golden.err
    alone = cli(*shared, "kind=candidate", "scope=single", "layer=1", "component=mlp")
    assert alone.exit == 0, alone.err
    other = (*shared[:-1], f"model.path={make('biogpt')}", *tokens)
    ended = cli(*other)
    assert ended.exit == 2, ended.out
    said = "biogpt computes something between embed_tokens and layers that belongs to no stage"
    assert f"{said} (its embed_positions)" in ended.err
    assert "Traceback" not in ended.err


OSS = ("backend=gpu", "device_map=cpu", "model=checkpoint", "capture=components")


def test_gpt_oss_through_the_door(cli: Callable[..., Ended], tmp_path: Path) -> None:
    """A fault of one class of layers is named there; a test of the other class shows nothing."""
    folder = make_model("gpt_oss", tmp_path)
    (tmp_path / "ids.json").write_text(json.dumps([[*range(5, 45)], [*range(60, 84)]]))
    asked = (*OSS, f"model.path={folder}", f"tracking.folder={tmp_path / 'store'}")
    tokens = ("inputs=tokens", "inputs.file=ids.json", "generate.max_new_tokens=2")
    # No candidate is of another type, or in a chain, or a component alone.
    needed = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
    golden = cli(*asked, *tokens, *needed, "name=gold")
    assert golden.exit == 0, golden.err
    fault = ("kind=candidate", "port=fault", "port.name=swiglu_bias_dropped")
    faulty = cli(*asked, *fault, "generate.max_new_tokens=2", "name=whole")
    assert faulty.exit == 0, faulty.err
    reason = "layers of class sliding_attention keep their (up + 1)"
    assert f"swiglu_bias_dropped not at layers.0, layers.2: {reason}" in faulty.out
    model = [word for word in asked if word.startswith(("model", "tracking"))]
    judged = cli("job=compare", *model, "golden=gold", "candidate=whole")
    assert judged.exit == 1, judged.out
    assert "layers.1.mlp.experts is the first wrong place" in " ".join(judged.out.split())
    # Planted in the golden's own block, it gives these numbers.
    said = "shown (99 %): the activation multiplies by up (the model's by up + 1)"
    assert said in " ".join(judged.out.split())
    shared = ("-m", "scope=single", "layer=0,2", "name=other-class")
    assert cli(*asked, *fault[:1], *shared).exit == 0
    half = cli("job=compare", *model, "golden=gold", "candidate=other-class")
    assert half.exit == 4, half.out
    assert "only moe, sliding_attention layers were compared" in " ".join(half.out.split())


def test_llama4_shows_the_choices_of_a_router_that_gives_scores_alone(tmp_path: Path) -> None:
    """What is not chosen has the score 0; other weights of the chosen go on to the experts."""
    sizes = {"num_hidden_layers": 2, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2}
    port = port_of(make_model("llama4_text", tmp_path, changes=sizes))
    ids, call = padded_batch()
    _, seen = run_all(port, ids, call)
    block = seen["layers.1"]
    assert block.unseen == {}
    logits, choices = block.tensors["mlp.gate:logits"], block.tensors["mlp.gate:choices"]
    assert torch.equal(choices, logits.topk(2).indices.sort().values)
    # As the router computes them, all at once: of the chosen alone, some may round otherwise.
    chosen = torch.full_like(logits, -math.inf).scatter(-1, choices, logits.gather(-1, choices))
    scores = chosen.flatten(0, 1).sigmoid().view_as(logits)
    assert torch.equal(block.tensors["mlp.gate:weights"], scores.gather(-1, choices))
    proved = proof.prove(port.skeleton, family_of("llama4_text"))
    measured = proved.kinds[classes_of(port.skeleton)[1]].block
    assert measured.is_from("feed_forward.experts:in", "mlp.gate:weights")


def test_llama4_weighs_its_experts_in_the_order_in_which_weights_are_stored() -> None:
    """By expert, whichever scores higher: repeated weights reach the expert they are of."""
    (tap,) = [tap for tap in family_of("llama4_text").taps if tap.local == WEIGHED]
    assert tap.derived is not None and tap.derived.write is not None
    scores = torch.tensor([[0.9, 0.0, 0.3], [0.0, 0.2, 0.8]])
    router = SimpleNamespace(top_k=2)
    stored = tap.derived.read(router, (scores, scores))
    assert torch.equal(stored, torch.tensor([[0.9, 0.3], [0.2, 0.8]]))
    assert torch.equal(tap.derived.write(router, (scores, scores), stored)[0], scores)


@pytest.mark.parametrize("name", ["qwen3_next", "llama4_text"])
def test_a_mutation_is_drawn_of_any_block_and_said(tmp_path: Path, name: str) -> None:
    """A gate of one row, as Qwen3-Next's shared expert has, has no two rows to swap."""
    sizes = {"interleave_moe_layer_step": 2} if name == "llama4_text" else {}
    base = port_of(make_model(name, tmp_path, changes={"num_hidden_layers": 2, **sizes}))
    for index in (0, 3):
        base.assets.backend.warnings.clear()
        port = MutationPort(base.assets, index)
        (said,) = base.assets.backend.warnings
        assert said == f"The mutation that was drawn: {port.fault.story}."
