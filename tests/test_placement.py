"""Placement: max_memory as it is written, budgets, and plans over pretended GPUs."""

from __future__ import annotations

import logging

import pytest

from layerparity.ground.errors import UserError
from layerparity.machine.max_memory import (
    UNLIMITED,
    Limits,
    budget,
    check_strategy,
    parse_limits,
    size_text,
)

GB = 10**9
BIG = {"embed_tokens": 1_229_193_216, **{f"layers.{n}": 7_337_437_696 for n in range(62)}}
BIG |= {"norm": 6_144, "lm_head": 1_229_193_216}
BLOCKS = [stage for stage in BIG if stage.startswith("layers")]


def plan(sizes, strategy, memory, blocks=()):
    from layerparity.machine.placement import plan_devices

    return plan_devices(sizes, strategy, memory, blocks)


def eight(size=80 * GB, cpu=1000 * GB):
    return dict.fromkeys(range(8), size) | {"cpu": cpu}


def held(chosen, sizes):
    total = {}
    for stage, device in chosen.items():
        total[device] = total.get(device, 0) + sizes[stage]
    return total


# ---------------------------------------------------------------- max_memory as it is written


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        (None, Limits()),
        ("40GB", Limits(every=40 * GB)),
        ("0:60GB,1:60GB,2:40GB", Limits(gpus={0: 60 * GB, 1: 60 * GB, 2: 40 * GB})),
        (" 0 : 1.5 GiB , cpu:100gb", Limits(gpus={0: 3 * 2**29}, cpu=100 * GB)),
        ("40GB,cpu:1TB", Limits(every=40 * GB, cpu=1000 * GB)),
        ("cpu:0B", Limits(cpu=0)),
        ("cpu:12KB", Limits(cpu=12_000)),
    ],
)
def test_limits_are_read(text, limits):
    assert parse_limits(text) == limits


@pytest.mark.parametrize(
    "text",
    [
        *("", "40", "40G", "40iB", "0=60GB", "0:60GB;1:60GB", "0:60GB,", "-1:60GB", "-4GB"),
        *("gpu:4GB", "cuda:0:4GB", "disk:4GB", "0:GB", "1e3GB", "lots"),
    ],
)
def test_a_bad_limit_is_answered_with_the_form_as_typed_on_the_shell(text):
    with pytest.raises(UserError, match="not a size") as caught:
        parse_limits(text)
    assert "'max_memory=\"0:60GB,1:60GB" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["0:1GB,0:2GB", "0:1GB,00:2GB", "cpu:1GB,CPU:2GB", "1GB,2GB", "40GB,0:60GB"]
)
def test_a_device_is_limited_once(text):
    with pytest.raises(UserError, match=r"twice|choose one"):
        parse_limits(text)


def test_a_size_is_written_so_that_it_can_be_typed_and_suffices():
    for size in (0, 1, 999, 1000, 37_850, 7_337_437_696, 457_379_497_984, 2 * 10**12 + 1):
        assert parse_limits(f"cpu:{size_text(size)}").cpu >= size
    assert size_text(7_337_437_696) == "7.34GB"


# ---------------------------------------------------------------- strategies and budgets


@pytest.mark.parametrize("strategy", ["balance", "cuda", "cuda:", "cuda:x", "gpu", ""])
def test_an_unknown_strategy_lists_the_known(strategy):
    with pytest.raises(UserError, match="balanced_low_0, sequential, cpu, stream, cuda:N"):
        check_strategy(strategy)


def test_a_typo_gets_a_hint():
    with pytest.raises(UserError, match="Did you mean 'balanced'"):
        check_strategy("balancd")


def test_every_gpu_is_limited_and_the_cpu_keeps_its_own():
    memory = budget("auto", parse_limits("40GB"), [80 * GB] * 2, 100 * GB)
    assert memory == {0: 40 * GB, 1: 40 * GB, "cpu": 90 * GB}


def test_only_named_gpus_are_used():
    memory = budget("auto", parse_limits("1:60GB,2:0GB"), [80 * GB] * 4, 100 * GB)
    assert memory == {1: 60 * GB, "cpu": 90 * GB}


def test_a_limit_never_exceeds_what_is_free():
    assert budget("cuda:0", parse_limits("60GB"), [50 * GB]) == {0: 50 * GB}


def test_without_a_limit_room_is_left_for_activations():
    assert budget("cuda:1", Limits(), [80 * GB, 100 * GB]) == {1: 90 * GB}


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_without_a_gpu_the_cpu_takes_all_unless_limited(strategy):
    assert budget(strategy, Limits(), [], 100 * GB) == {"cpu": UNLIMITED}
    assert budget(strategy, parse_limits("cpu:1GB"), [], 100 * GB) == {"cpu": GB}


@pytest.mark.parametrize(
    ("strategy", "text", "count", "says"),
    [
        ("cuda:3", None, 0, "cuda:3 was asked for; this machine has 0 GPUs: use device_map=cpu."),
        ("cuda:0", None, 0, "this machine has 0 GPUs: use device_map=cpu."),
        ("cuda:1", None, 1, "this machine has 1 GPU: the last one is cuda:0."),
        ("auto", "0:60GB,1:60GB", 0, "cuda:0 was asked for in max_memory; this machine has 0"),
        ("sequential", "0:60GB,9:60GB", 8, "cuda:9 was asked for in max_memory; this machine ha"),
        ("cpu", "40GB", 0, "device_map=cpu uses no GPU: write max_memory=cpu:40GB"),
        ("cpu", "0:40GB", 2, "device_map=cpu uses no GPU"),
        ("cuda:0", "1:40GB", 2, "device_map=cuda:0 uses only cuda:0: write max_memory=0:40GB"),
        ("cuda:0", "cpu:40GB", 2, "uses only cuda:0"),
    ],
)
def test_what_is_not_there_is_refused_with_the_cure(strategy, text, count, says):
    with pytest.raises(UserError) as caught:
        budget(strategy, parse_limits(text), [80 * GB] * count)
    assert says in str(caught.value)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_457_gb_fit_eight_gpus_in_running_order(strategy):
    chosen = plan(BIG, strategy, eight(), BLOCKS)
    assert list(chosen) == list(BIG)
    order = [int(device.removeprefix("cuda:")) for device in chosen.values()]
    assert order == sorted(order)
    assert all(size <= 80 * GB for size in held(chosen, BIG).values())


def test_balanced_differs_from_sequential():
    sequential = held(plan(BIG, "sequential", eight(), BLOCKS), BIG)
    balanced = held(plan(BIG, "balanced", eight(), BLOCKS), BIG)
    # Sequential fills each GPU before the next one (the first keeps room for the largest stage).
    assert sequential["cuda:1"] > 73 * GB
    assert sequential.get("cuda:7", 0) < 40 * GB
    assert max(balanced.values()) < 67 * GB
    assert plan(BIG, "auto", eight(), BLOCKS) == plan(BIG, "balanced", eight(), BLOCKS)


def test_low_0_leaves_the_first_gpu_empty():
    chosen = plan(BIG, "balanced_low_0", eight(), BLOCKS)
    assert "cuda:0" not in chosen.values()
    assert {f"cuda:{n}" for n in range(1, 8)} == set(chosen.values())


@pytest.mark.parametrize("strategy", ["balanced", "balanced_low_0", "sequential"])
@pytest.mark.parametrize("gpus", [(1, 2, 5), (0, 2, 3), (3,)])
def test_gpus_with_gaps_keep_their_indices(strategy, gpus):
    sizes = {f"layers.{n}": 10 * GB for n in range(6)}
    memory = dict.fromkeys(gpus, 100 * GB) | {"cpu": 100 * GB}
    used = set(plan(sizes, strategy, memory, sizes).values())
    assert used <= {f"cuda:{n}" for n in gpus}


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_a_short_range_stays_on_the_gpus(layers):
    sizes = {f"layers.{n}": 7_337_437_696 for n in range(layers)} | {"norm": 6_144}
    chosen = plan(sizes, "balanced", eight(), list(sizes)[:layers])
    assert all(device.startswith("cuda") for device in chosen.values())
    assert max(held(chosen, sizes).values()) <= 4 * 7_337_437_696


def test_the_rest_goes_to_the_cpu_then_to_disk():
    chosen = plan(BIG, "auto", eight(40 * GB, 60 * GB), BLOCKS)
    order = [next(k for k in ("cuda", "cpu", "disk") if d.startswith(k)) for d in chosen.values()]
    assert order == sorted(order, key=["cuda", "cpu", "disk"].index)
    assert set(order) == {"cuda", "cpu", "disk"}
    assert held(chosen, BIG)["cpu"] <= 60 * GB


def test_what_waits_elsewhere_runs_where_accelerate_keeps_room_for_it():
    from layerparity.machine.placement import execution_device

    memory = {2: GB, 1: GB, "cpu": GB}
    assert [execution_device(each, memory) for each in ("cuda:2", "cpu", "disk")] == [
        *("cuda:2", "cuda:1", "cuda:1")
    ]
    assert execution_device("disk", {"cpu": GB}) == "cpu"


@pytest.mark.parametrize(("strategy", "key"), [("cpu", "cpu"), ("cuda:3", 3)])
def test_a_single_device_takes_all_or_says_what_is_needed(strategy, key):
    assert set(plan(BIG, strategy, {key: 460 * GB}).values()) == {strategy}
    with pytest.raises(UserError, match=rf"need 457\.38GB on {strategy}, which may hold 141GB"):
        plan(BIG, strategy, {key: 141 * GB})


@pytest.mark.parametrize("memory", [{0: 5 * GB, "cpu": 900 * GB}, {"cpu": 5 * GB}])
def test_a_stage_that_fits_nowhere_says_what_is_needed(memory):
    runs_on = "cuda:0" if 0 in memory else "cpu"
    with pytest.raises(UserError, match=rf"layers.0 alone needs 7\.34GB on {runs_on} while it"):
        plan(BIG, "auto", memory, BLOCKS)


def test_pretended_gpus_are_planned_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        plan(BIG, "balanced", eight(), BLOCKS)
    assert not caplog.records


def test_an_empty_stage_is_placed():
    assert plan({"norm": 0}, "auto", {0: GB, "cpu": GB}) == {"norm": "cuda:0"}


# ---------------------------------------------------------------- against accelerate and the model


@pytest.fixture(scope="module")
def real():
    import torch
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    config = MiniMaxM2Config(rotary_dim=64, num_hidden_layers=62)
    with torch.device("meta"):
        return MiniMaxM2ForCausalLM._from_config(config, dtype=torch.float32)


def stages_of(model):
    base = ["embed_tokens", *(f"layers.{n}" for n in range(len(model.model.layers))), "norm"]
    return {stage: f"model.{stage}" for stage in base} | {"lm_head": "lm_head"}


def sizes_of(model, dtype):
    from layerparity.machine.placement import stage_bytes

    return {s: stage_bytes(model.get_submodule(p), dtype) for s, p in stages_of(model).items()}


@pytest.mark.parametrize("strategy", ["balanced", "balanced_low_0", "sequential"])
def test_the_whole_model_lies_as_accelerate_lays_it(real, strategy):
    import torch
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    ours = plan(sizes_of(real, torch.bfloat16), strategy, eight(), BLOCKS)
    kinds, memory = real._no_split_modules, eight()
    if strategy != "sequential":
        low = strategy == "balanced_low_0"
        memory = get_balanced_memory(real, memory, kinds, torch.bfloat16, low_zero=low)
    theirs = infer_auto_device_map(real, memory, kinds, torch.bfloat16, clean_result=False)
    assert ours == {s: f"cuda:{theirs[path]}" for s, path in stages_of(real).items()}


def test_bytes_are_the_models_own(real):
    import torch

    sizes = sizes_of(real, torch.bfloat16)
    bias = 62 * 256  # e_score_correction_bias is a buffer, and no parameter.
    assert sum(sizes.values()) == 2 * (228_689_748_992 + bias)
    assert sum(sizes_of(real, torch.float64).values()) == 4 * sum(sizes.values())
    assert sizes == BIG | dict.fromkeys(BLOCKS, 7_337_437_696)
