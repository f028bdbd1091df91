"""Fit: bytes against the meta model, the cache against transformers', estimates against peaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from layerparity.anatomy.family import family_of
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.ground.errors import UserError
from layerparity.ground.resources import shipped
from layerparity.machine.max_memory import (
    STAND_IN_COPIES,
    most_at_once,
    reads_ahead,
    room_for_weights,
)
from layerparity.making.needs import ForwardPass, cache_bytes, stage_activations
from layerparity.model.architecture import read_config
from layerparity.model.skeleton import Skeleton
from layerparity.plan.devices import MACHINES, Devices, parse_devices
from layerparity.plan.fit import cures, why_not
from layerparity.plan.placement import Placement, place
from layerparity.plan.question import Question
from layerparity.plan.sharding_limits import LIMIT, degrees, divided, smallest, too_large
from layerparity.plan.survey import survey
from layerparity.plan.weights import (
    PlannedModel,
    StageWeight,
    WeightBytes,
    build,
    bytes_of,
    ranges,
)
from layerparity.selftest.models import small_config

GB, GIB = 10**9, 2**30
PARAMETERS = 228_689_748_992
LAYERS = 62


def stages(layers: int) -> list[str]:
    return ["embed_tokens", *(f"layers.{n}" for n in range(layers)), "norm", "lm_head"]


@pytest.fixture(scope="module")
def real() -> PlannedModel:
    from omegaconf import OmegaConf

    read: Any = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "model/minimax_m2.yaml"))
    return build(read["architecture"], family_of("minimax_m2"), stages(LAYERS), None, None)


@pytest.fixture
def ask(real: PlannedModel) -> Callable[..., Question]:
    def made(devices: str, strategy: str = "auto", **changes: Any) -> Question:
        usual = Question(real, parse_devices(devices), strategy, None, "bfloat16", 1, 2048)
        return replace(usual, **changes)

    return made


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("text", "meant"),
    [("trn3", "trn3-gen1"), ("TRN2", "trn2.3xlarge"), ("trn2.48xl", "trn2.48xlarge")],
)
def test_a_name_that_is_no_instance_is_answered_with_one(text: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"Did you mean '{meant}'\?"):
        parse_devices(text)


def test_devices_are_read() -> None:
    assert parse_devices("8x80GB").sizes == (80 * GB,) * 8
    assert parse_devices("141GB").sizes == (141 * GB,)
    assert parse_devices("2xh200, A100-40").sizes == (141 * GB, 141 * GB, 40 * GB)
    mixed = parse_devices(" 2X80GB , 1x40GiB, cpu:500GB ")
    assert (mixed.sizes, mixed.cpu) == ((80 * GB, 80 * GB, 40 * GIB), 500 * GB)
    assert mixed.describe() == "2 of 80GB, 1 of 42.95GB, a CPU with 500GB"


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "x80GB", "0x80GB", "8x80", "8x0GB", "8*80GB", "-1x80GB", "9999x80GB",
             "8x80GB,", "cpu:", "0:80GB", "cpu:1GB,cpu:2GB", "8x80GB;1x40GB", "8xfoo", "1.5x80GB"]
)  # fmt: skip
def test_bad_devices_are_answered_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match=r"Write plan\.devices=8x80GB") as caught:
        parse_devices(text)
    assert "\n" not in str(caught.value)


def test_stages_are_told_as_ranges() -> None:
    assert ranges(stages(3)) == "embed_tokens, layers.0..2, norm, lm_head"
    assert ranges(["layers.4", "layers.6", "layers.7"]) == "layers.4, layers.6..7"
    assert ranges(["layers.3.mlp"]) == "layers.3.mlp"


# ---------------------------------------------------------------- weights


def test_bytes_equal_the_meta_models_to_the_byte(real: PlannedModel) -> None:
    import torch
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    config = MiniMaxM2Config(rotary_dim=64, num_hidden_layers=LAYERS)
    with torch.device("meta"):
        theirs = MiniMaxM2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert real.parameters == sum(p.numel() for p in theirs.parameters()) == PARAMETERS
    assert real.bytes("bfloat16").parameters == sum(p.nbytes for p in theirs.parameters())
    assert real.bytes("bfloat16").parameters == 457_379_497_984
    # The router's correction bias is a buffer, and stays float32 in every run.
    assert real.bytes("bfloat16").buffers == real.bytes("float32").buffers == LAYERS * 256 * 4
    assert real.bytes("float32").parameters == 4 * PARAMETERS


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["bloom", "gemma", "gpt2", "granite", "granitemoe", "llama"])
def test_parameters_are_as_many_as_transformers_counts(name: str, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = small_config(name, {"tie_word_embeddings": tied})
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    scope = ["embed_tokens", *(f"layers.{each}" for each in range(4)), "norm", "lm_head"]
    ours = build(config.to_dict(), family_of(name), scope, None, None)
    assert ours.parameters == theirs.num_parameters()
    assert ours.bytes("bfloat16").parameters == sum(p.nbytes for p in theirs.parameters())
    head = theirs.get_output_embeddings().weight.nbytes
    assert ours.twice("bfloat16") == (head if tied else 0)
    alone = build(config.to_dict(), family_of(name), ["lm_head"], None, None)
    assert alone.bytes("bfloat16").parameters == head, "a head by itself is no second one"


@pytest.mark.parametrize("devices", ["8x80GB", "3x80GB,2x141GB,cpu:100GB", "cpu:900GB"])
@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_what_the_devices_hold_adds_up(ask: Any, devices: str, strategy: str) -> None:
    found = place(ask(devices, strategy))
    assert found.size == WeightBytes(457_379_497_984, LAYERS * 256 * 4)
    held = [stage for share in found.shares for stage in share.stages]
    assert held == stages(LAYERS)


def test_a_tied_head_has_weights_of_its_own_as_in_a_run(made: Any) -> None:
    values = json.loads((made("llama") / "config.json").read_text())
    tied = build(values, family_of("llama"), ["embed_tokens", "lm_head"], None, None)
    assert [w.parameter for each in tied.weights.values() for w in each] == [True, True]
    once = 300 * 64 * 4
    assert (tied.bytes("float32"), tied.twice("float32")) == (WeightBytes(once, 0), once)
    held = [weight for each in tied.weights.values() for weight in each]
    assert bytes_of(held, "float32") == WeightBytes(2 * once, 0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_bytes_are_those_that_a_run_holds(
    made: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """By what the family keeps in float32, and transformers' class in float16, or in both."""
    import torch
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["down_proj"])
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["q_proj"])
    family = replace(family_of("llama"), float32_patterns=("*.lm_head.weight", "model.norm*"))
    values = json.loads((made("llama") / "config.json").read_text())
    plan = build(values, family, stages(3), None, None)
    run = Skeleton(
        read_config(values), getattr(torch, dtype), "sdpa", None, family.float32_patterns
    )
    held = run.model.state_dict()
    due = sum(value.numel() * run.held_dtype(name).itemsize for name, value in held.items())
    assert plan.bytes(dtype).all + plan.twice(dtype) == due
    head = plan.weights["lm_head"][0]
    assert head.bytes(dtype) == head.numel * 4


def test_what_the_architecture_makes_in_float32_stays_so(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers.models.llama import modeling_llama

    whole = modeling_llama.LlamaRMSNorm.__init__

    def wide(self: Any, *arguments: Any, **named: Any) -> None:
        whole(self, *arguments, **named)
        self.weight = torch.nn.Parameter(self.weight.to(torch.float32))

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "__init__", wide)
    values = json.loads((made("llama") / "config.json").read_text())
    plan = build(values, family_of("llama"), ["norm"], None, None)
    assert [plan.bytes(dtype).all for dtype in ("float64", "bfloat16")] == [64 * 4] * 2


def test_tensor_parallel_splits_matrices_and_repeats_the_rest() -> None:
    held = [StageWeight("a", (10, 3), 30, True), StageWeight("b", (10,), 10, True), StageWeight("c", (4,), 4, False, 4)]  # fmt: skip # noqa: E501
    assert bytes_of(held, "bfloat16") == WeightBytes(80, 16)
    assert bytes_of(held, "bfloat16", 4) == WeightBytes(15 + 20, 16)


# ---------------------------------------------------------------- cache and activations

DENSE = ModelSizes(64, 4, 2, 16, 16, 96, 96, 0, 0, 300, (0, 0, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_what_transformers_allocates(dtype: str) -> None:
    import torch
    from transformers import Gemma2Config, MiniMaxM2Config, StaticCache

    common = {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 300}
    for config in (
        MiniMaxM2Config(**common, num_key_value_heads=2, hidden_size=64),
        Gemma2Config(**common, num_key_value_heads=2, hidden_size=64, sliding_window=8),
    ):
        kind, sizes = getattr(torch, dtype), sizes_of(config)
        cache = StaticCache(config=config, max_cache_len=24)
        cache.early_initialization(3, 2, 16, kind, torch.device("cpu"))
        allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        ours = sum(
            cache_bytes(sizes, f"layers.{n}", batch=3, tokens=24, itemsize=kind.itemsize)
            for n in range(4)
        )
        assert ours == allocated
    assert sizes.windows.count(8) == 2


@pytest.mark.parametrize(("name", "states"), [("qwen3_next", {0, 2}), ("jamba", {0, 2}), ("lfm2", {0, 2}), ("mamba", {0, 1, 2, 3})])  # fmt: skip # noqa: E501
def test_a_state_does_not_grow_with_the_tokens(name: str, states: set[int]) -> None:
    """Its blocks are those for which transformers' static cache makes no keys and values."""
    from transformers import AutoConfig, StaticCache

    kinds = ["linear_attention" if name != "lfm2" else "conv", "full_attention"] * 2
    own = {"jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "mamba": {}}
    config = AutoConfig.for_model(
        name, num_hidden_layers=4, **own.get(name, {"layer_types": kinds})
    )
    sizes = sizes_of(config)
    assert sizes.without_keys == states
    cache = StaticCache(config=config, max_cache_len=24)
    assert {n for n, each in enumerate(cache.layers) if not hasattr(each, "keys")} == states
    size = {"batch": 1, "tokens": 24, "itemsize": 2}
    kept = [cache_bytes(sizes, f"layers.{n}", **size) > 0 for n in range(4)]
    assert kept == [n not in states for n in range(4)]


def test_only_attention_keeps_a_cache() -> None:
    size = {"batch": 1, "tokens": 10, "itemsize": 2}
    kept = [cache_bytes(DENSE, stage, **size) for stage in ("layers.1", "layers.1.self_attn")]
    assert kept == [2 * 2 * 16 * 10 * 2] * 2
    for stage in ("embed_tokens", "norm", "lm_head", "layers.1.mlp"):
        assert cache_bytes(DENSE, stage, **size) == 0
    # Two KV heads on eight devices: each keeps a whole head.
    assert cache_bytes(DENSE, "layers.1", degree=8, **size) == kept[0] // 2


def measured(config: Any, dtype: str, attention: str, experts: str | None, rows: int) -> int:
    """Return the peak bytes that a block of two sequences allocates while it computes."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import create_causal_mask

    options = {"experts_implementation": experts} if experts else {}
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=attention, **options
    )
    given = torch.randn(2, rows, config.hidden_size, dtype=getattr(torch, dtype))
    ids = torch.arange(rows)[None].expand(2, rows)
    mask = create_causal_mask(model.config, given, torch.ones_like(ids), None, position_ids=ids)
    block, tables = model.model.layers[0].eval(), model.model.rotary_emb(given, ids)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        block(given, attention_mask=mask, position_ids=ids, position_embeddings=tables)
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = given.nbytes
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


CONFIGS = {
    "moe": ("MiniMaxM2Config", {"intermediate_size": 128, "num_local_experts": 16,
                                "num_experts_per_tok": 4, "rotary_dim": 16}),
    "qwen": ("Qwen3MoeConfig", {"moe_intermediate_size": 128, "num_experts": 16,
                                "num_experts_per_tok": 4, "intermediate_size": 512}),
    "dense": ("LlamaConfig", {"intermediate_size": 768}),
}  # fmt: skip


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        *(("moe", "grouped_mm"), ("moe", "eager"), ("moe", "batched_mm"), ("moe", "static")),
        *(("qwen", "grouped_mm"), ("dense", None)),
    ],
)
def test_activations_are_estimated_within_a_factor_of_two(
    kind: str, experts: str | None, dtype: str, attention: str, rows: int
) -> None:
    import transformers

    from layerparity.model import static_experts

    if experts == "batched_mm" and rows > 64:
        pytest.skip("gathers a gigabyte of weights")
    static_experts.register()
    name, own = CONFIGS[kind]
    config = getattr(transformers, name)(
        **own, vocab_size=300, hidden_size=256, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = ForwardPass(2, rows, 4 if dtype == "float32" else 2, attention, experts or "eager")
    estimate = stage_activations(sizes_of(config), "layers.0", kind != "dense", made)
    peak = measured(config, dtype, attention, experts, rows)
    assert peak / 2 <= estimate <= peak * 2, (estimate / peak, estimate, peak)


def test_a_component_needs_no_more_than_its_block() -> None:
    made = ForwardPass(1, 100, 2, "sdpa", "eager")
    block = stage_activations(DENSE, "layers.0", False, made)
    parts = [f"layers.0.{each}" for each in ("self_attn", "mlp", "input_layernorm")]
    assert max(stage_activations(DENSE, part, False, made) for part in parts[:2]) == block
    assert stage_activations(DENSE, parts[2], False, made) < block
    assert stage_activations(DENSE, "lm_head", False, made) == 100 * (64 + 300) * 2


# ---------------------------------------------------------------- answers and cures


def test_an_answer_counts_what_lies_beside_the_weights(ask: Any) -> None:
    last = place(ask("8x80GB")).shares[-1]
    assert last.device == "cuda:7"
    assert last.headroom == 80 * GB - last.weights - last.cache - last.activations
    longer = place(ask("8x80GB", tokens=4096)).shares[-1]
    assert longer.cache == 2 * last.cache == 2 * 2 * 8 * 128 * 2048 * 2
    assert longer.activations == 2 * last.activations


def test_weights_that_fit_without_room_to_compute_do_not_fit(ask: Any) -> None:
    found = place(ask("8x80GB", tokens=150_000))
    assert not found.fits
    assert why_not(found).startswith("cuda:0 lacks")
    assert cures(ask("8x80GB", tokens=150_000))[0] == "seq_len=37500"


def test_what_waits_elsewhere_does_not_fit(ask: Any) -> None:
    found = place(ask("6x80GB,cpu:30GB"))
    assert [share.device for share in found.shares if share.waits] == ["cpu", "disk"]
    # Its cache is where it computes.
    caches = [share.cache for share in found.shares]
    assert caches[-2:] == [0, 0]
    assert caches[0] > caches[1]
    assert not found.fits
    assert "find no place where they compute" in why_not(found)


BLOCK = 3_668_718_592 * 2


def test_streaming_holds_what_a_run_holds(ask: Any) -> None:
    """On the device the stage that computes, in the CPU's memory two, as the run's own check."""
    one, two = (WeightBytes(n * BLOCK, n * 256 * 4) for n in (1, 2))
    device, host = place(ask("1x24GB,cpu:40GB", "stream")).shares
    assert (device.device, device.size, device.at_once) == ("cuda:0", one, 1)
    assert (host.device, host.size, host.at_once) == ("cpu", two, 2)
    assert (host.cache, host.activations, host.limit) == (0, 0, room_for_weights(36 * GB))
    question = ask("1x24GB,cpu:40GB", "stream")
    assert host.weights == most_at_once(question.weights)
    assert reads_ahead(question.weights, host.limit)


def test_streaming_reads_nothing_ahead_where_two_do_not_fit(ask: Any) -> None:
    found = place(ask("1x24GB,cpu:16GB", "stream"))
    assert (found.fits, found.shares[1].at_once) == (True, 1)
    room = room_for_weights(int(0.9 * 16 * GB))
    assert not reads_ahead(ask("1x24GB", "stream").weights, room)
    # A limit of the user's own is taken as it is.
    tight = ask("1x24GB,cpu:40GB", "stream", max_memory="cpu:14.68GB")
    assert place(tight).shares[1].at_once == 2
    alone = place(ask("cpu:16GB", "stream"))
    assert [(share.device, share.at_once, share.fits) for share in alone.shares] == [
        ("cpu", 1, True)
    ]
    assert place(ask("cpu:24GB", "stream")).shares[0].at_once == 2


def test_streaming_that_finds_no_room_says_where(ask: Any) -> None:
    short = ask("1x24GB,cpu:8GB", "stream")
    assert why_not(place(short)) == "cpu may hold 6.94GB of weights and is given 7.34GB."
    assert cures(short) == ["more than 8.46GB of memory beside the devices"]
    assert place(ask("1x24GB,cpu:8.46GB", "stream")).fits
    assert cures(ask("cpu:8GB", "stream")) == ["more than 8.46GB of memory"]
    limited = place(ask("1x24GB", "stream", max_memory="7GB"))
    assert why_not(limited) == "cuda:0 may hold 6.74GB of weights and is given 7.34GB."
    # A pretended machine of which only the device is known.
    assert [share.device for share in place(ask("1x9GB", "stream")).shares] == ["cuda:0"]
    assert place(ask("1x9GB", "stream")).fits


def test_a_streamed_generation_begins_again_beside_its_end(made: Any) -> None:
    values = json.loads((made("llama") / "config.json").read_text()) | {"vocab_size": 30_000}
    model = build(values, family_of("llama"), stages(3), None, None)
    asked = Question(model, parse_devices("cpu:1GB"), "stream", None, "bfloat16", 1, 8)
    ends = asked.weights["lm_head"] + asked.weights["embed_tokens"]
    for new, held in ((0, None), (1, None), (2, ends), (9, ends)):
        (share,) = place(replace(asked, new_tokens=new)).shares
        assert share.weights == (held or asked.weights["embed_tokens"] + asked.weights["layers.0"])
        assert share.weights == most_at_once(asked.weights, again=new > 1)
        assert ("lm_head" in share.stages) == (new > 1)


def test_neuron_streams_too(ask: Any) -> None:
    device, host = place(ask("2x96GiB,cpu:64GB", "stream", one_device=True, degree=2)).shares
    assert (device.device, device.copies, device.at_once) == ("each of neuron:0..1", 2, 1)
    assert BLOCK / 2 <= device.weights < BLOCK / 2 + 10**5
    assert host.weights == 2 * (BLOCK + 256 * 4)
    (alone,) = place(ask("cpu:64GB", "stream", one_device=True)).shares
    assert (alone.device, alone.at_once) == ("XLA:CPU", 2)
    assert alone.weights == STAND_IN_COPIES * 2 * (BLOCK + 256 * 4)
    (alone,) = place(ask("cpu:24GB", "stream", one_device=True)).shares
    assert alone.at_once == 1


def test_neuron_splits_the_whole_scope_over_its_degree(ask: Any) -> None:
    share = place(ask("16x96GiB", one_device=True, degree=8)).shares[0]
    assert (share.device, share.copies) == ("each of neuron:0..7", 8)
    assert 0 < 8 * share.weights - 457_379_561_472 < 8 * LAYERS * 64_000
    with pytest.raises(UserError, match="tp_degree=32 wants as many devices, and there are 16"):
        place(ask("16x96GiB", one_device=True, degree=32))
    with pytest.raises(UserError, match="max_memory is for backend=gpu"):
        place(ask("16x96GiB", one_device=True, max_memory="4GB"))
    assert place(ask("cpu:900GB", one_device=True, degree=8)).size.parameters == 457_379_497_984


@pytest.mark.parametrize(
    ("devices", "changes", "said"),
    [
        ("6x80GB", {}, ["7 devices of 80GB", "device_map=stream"]),
        ("8x80GB", {"dtype": "float32"}, ["dtype=bfloat16", "device_map=stream"]),
        ("8x80GB", {"max_memory": "40GB"}, ["max_memory=79.16GB", "device_map=stream"]),
        ("1x40GB", {"strategy": "cuda:0"}, ["device_map=stream"]),
        ("2x4GB", {}, ["a device of more than 7.99GB, which the largest stage alone needs"]),
        ("1x10GB", {}, ["device_map=stream"]),
        ("1x10GB,cpu:1GB", {}, ["fewer blocks: scope=range start=A end=B"]),
    ],
)
def test_a_cure_was_tried(ask: Any, devices: str, changes: dict[str, Any], said: list[str]) -> None:
    question = ask(devices, **changes)
    assert not place(question).fits
    assert cures(question) == said


def test_a_cure_in_settings_makes_it_fit(ask: Any) -> None:
    question = ask("8x80GB", max_memory="40GB")
    key, _, value = cures(question)[0].partition("=")
    assert place(replace(question, **{key: value})).fits


def test_no_device_can_run_a_block(ask: Any) -> None:
    found = place(ask("2x4GB"))
    assert found == Placement((), found.refused)
    assert why_not(found) == (
        "layers.0 alone needs 7.34GB on cuda:0 while it runs, which may hold 3.6GB."
    )


def test_a_cpu_without_memory_is_refused(ask: Any) -> None:
    with pytest.raises(UserError, match=r"plan\.devices names no memory for it: add cpu:500GB"):
        place(ask("8x80GB", "cpu"))


# ---------------------------------------------------------------- common machines


def test_the_table_of_machines(ask: Any) -> None:
    rows = {row.machine.name: row for row in survey(ask("8x80GB"))}
    holds = {"8xA100-80", "8xH200", "trn2.48xlarge", "trn1.32xlarge"}
    assert {name for name, row in rows.items() if row.fits} == holds
    assert set(rows) - holds == {"8xA100-40", "4xH100", "6xH100", "1xH200"}
    assert rows["8xA100-40"].headroom < 0 < rows["6xH100"].headroom
    assert rows["6xH100"].note == "enough in all, but only 10 whole blocks on a device"
    assert "tp_degree=8 splits" in rows["trn2.48xlarge"].note
    for row in rows.values():
        assert (row.tightest is not None) == row.fits
        assert row.tightest is None or 0 <= row.tightest <= row.machine.each


def test_machines_are_as_large_as_their_makers_say() -> None:
    total = {machine.name: machine.total for machine in MACHINES}
    assert total["trn2.48xlarge"] == 1536 * GIB
    assert total["trn1.32xlarge"] == 512 * GIB
    assert total["8xA100-80"] == 2 * total["8xA100-40"] == 2 * total["4xH100"] == 640 * GB
    assert total["8xH200"] == 8 * total["1xH200"] == 1128 * GB


# ---------------------------------------------------------------- Neuron's compiler, tp_degree


def test_the_tensor_the_compiler_refuses(real: PlannedModel) -> None:
    every = [weight for each in real.weights.values() for weight in each]
    (row,) = too_large(every, "bfloat16", degrees(real.sizes))
    assert row.name == "layers.0..61.mlp.experts.gate_up_proj"
    assert (row.shape, row.bytes, row.degree) == ((256, 3072, 3072), 4_831_838_208, 2)
    wide = too_large(every, "float32", degrees(real.sizes))
    assert [(row.name.rpartition(".")[2], row.degree) for row in wide] == [
        ("gate_up_proj", 4),  # 3 would clear it, and divides 48 heads, but not 8 KV heads.
        ("down_proj", 2),
    ]


def test_the_smallest_degree_clears_the_limit() -> None:
    assert smallest(LIMIT, [1, 2, 4]) == 1
    assert smallest(LIMIT + 1, [1, 2, 4]) == 2
    assert smallest(3 * LIMIT, [1, 2, 4]) == 4
    assert smallest(5 * LIMIT, [1, 2, 4]) is None


def test_divisors_are_named(real: PlannedModel) -> None:
    found = {row.what: row.divisors for row in divided(real.sizes)}
    assert found["attention heads"] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert found["KV heads"] == [1, 2, 4, 8]
    assert max(found["intermediate size"]) == 1536
    assert found["experts"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert degrees(real.sizes) == [1, 2, 4, 8]
    both = replace(DENSE, experts=6, top_k=2, expert_intermediate=40)
    assert [row.size for row in divided(both)] == [4, 2, 96, 40, 6]
    assert degrees(both) == [1, 2]


def test_equal_devices_are_pretended_alike() -> None:
    assert parse_devices("2x80GB") == Devices((80 * GB, 80 * GB), 0, pretended=True)


def test_what_cannot_be_run_is_not_said_to_fit() -> None:
    """Nobody says how BioGPT reads its positions; fed apart, its blocks are the model's."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    values = {"model_type": "biogpt", **sizes, "intermediate_size": 96, "vocab_size": 300}
    with pytest.raises(UserError, match=r"belongs to no stage \(its embed_positions\)"):
        build(values, family_of("biogpt"), stages(2), None, None)
    assert build(values, family_of("biogpt"), ["layers.0"], None, None).parameters > 0


def test_every_module_of_an_embedding_is_weighed() -> None:
    """Once, under its own name; a tied head has a tensor of its own, as it has in a run."""
    values = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 300}
    model = build({**values, "n_positions": 32}, family_of("gpt2"), stages(1), None, None)
    shapes = {weight.name: weight.shape for weight in model.weights["embed_tokens"]}
    assert shapes == {"embed_tokens.wte.weight": (300, 64), "embed_tokens.wpe.weight": (32, 64)}
    assert [weight.shape for weight in model.weights["lm_head"]] == [(300, 64)]
